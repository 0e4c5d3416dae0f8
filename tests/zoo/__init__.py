"""Models of many kinds with random weights: which train privately, by which engine, at what cost.

    python -m tests.zoo                    # all rows, each in a process of its own
    python -m tests.zoo gru unet --page docs/reference/models.md

`catalog.py` lists the models and what is expected of each, the files beside it build them,
`trial.py` trains one and measures it, and `page.py` writes down what came out.
"""
