"""Around and inside a training step: from a batch to new weights, each step in the ledger."""
