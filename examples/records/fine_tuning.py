"""Fashion-MNIST: private fine-tuning of a small Vision Transformer, in whole, by LoRA, or its head.

    python examples/records/fine_tuning.py           # about an hour; goes on if it was interrupted
    python examples/records/fine_tuning.py --quick   # some minutes, most for the pre-training

What is public is a recipe, not a file of weights: letters, digits and signs of the DejaVu fonts
that come with Matplotlib, turned, sheared, scaled and shifted, in random shades. The Transformer
learns to tell them apart, which takes some minutes, and has then seen no clothes. Its weights are
kept in the output folder.

Then it is trained on private clothes in four ways, at equal ε: all its weights; a low-rank change
of every attention and dense kernel (LoRA) with the biases; the new head alone; and all weights,
drawn at random. The head is a linear layer on all tokens, which begins at zero. `DPAdam` with
bias correction, Poisson batches, and the average of the weights of the second half.

See `records.py` for the rule by which the learning rate is chosen,
by as many trials for each way.

Writes results.csv (all runs), trials-*.csv, fine_tuning.md and records_fine_tuning.png.
"""

import functools
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import drawings
import keras
import numpy as np
import records
import results
from example_data import fashion
from keras import layers

import dp_keras_opt as dp

DELTA = 1e-5
EPSILONS = [1.0, 3.0, 8.0]
RATE, STEPS = 0.075, 100  # batches of about 4,100: at a fixed ε, large batches cost least
PUBLIC, FOLDS = 5_000, 2
SPACE = {"learning_rate": (0.001, 0.03)}
RANK = 8
FULL, LORA, HEAD = "full fine-tuning", "LoRA", "head alone"
SCRATCH = "from scratch"
METHODS = [FULL, LORA, HEAD, SCRATCH]

SIZE, PATCH, WIDTH, BLOCKS, HEADS = 28, 7, 64, 2, 2
GLYPHS, EPOCHS = 120_000, 5
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def transformer():
    """A pre-norm Vision Transformer from pictures to one vector a patch."""
    pictures = keras.Input((SIZE, SIZE, 1))
    side = SIZE // PATCH
    x = layers.Reshape((side, PATCH, side, PATCH))(pictures)
    x = layers.Reshape((side**2, PATCH**2))(layers.Permute((1, 3, 2, 4))(x))
    # With a bias for each place: the embedding of the positions.
    embed = layers.EinsumDense("bpx,xw->bpw", (side**2, WIDTH), bias_axes="pw", name="patches")
    x = embed(x)
    for block in range(BLOCKS):
        attend = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{block}")
        expand = layers.Dense(2 * WIDTH, activation="gelu", name=f"expand_{block}")
        back = layers.Dense(WIDTH, name=f"back_{block}")
        normal = layers.LayerNormalization(name=f"norm_{block}_1")(x)
        x = x + attend(normal, normal)
        x = x + back(expand(layers.LayerNormalization(name=f"norm_{block}_2")(x)))
    return keras.Model(pictures, layers.LayerNormalization(name="norm")(x))


def network():
    """The Transformer, and what characters are told apart by: all of its output."""
    body = transformer()
    return body, body.output


def classifier(method, weights):
    """The Transformer with a new head, and what this way trains of it set trainable."""
    body = transformer()
    if method != SCRATCH:
        body.load_weights(weights)
    if method == HEAD:
        body.trainable = False
    if method == LORA:
        for layer in body._flatten_layers():
            if isinstance(layer, layers.LayerNormalization):
                layer.trainable = False
            elif isinstance(layer, layers.Dense | layers.EinsumDense):
                layer.enable_lora(RANK)
    head = layers.Dense(10, kernel_initializer="zeros", name="head")
    return dp.DPModel(body.input, head(layers.Flatten()(body.output)))


def batch_size(rows):
    return round(RATE * rows)


def train(method, weights, rows, epsilon, values, seed, stands_for=None):
    """A private classifier.

    Args:
        method: one of `METHODS`.
        weights: path of those of the pre-training.
        rows: (pictures, labels).
        epsilon: of a training on as many rows as these stand for.
        values: the learning rate.
        seed: of Keras; noise and batches stay unpredictable.
        stands_for: how many rows the private training has, if these are fewer and public: the
            noise relative to the batch is as there.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    count = len(rows[1])
    size, private = batch_size(count), stands_for or count
    optimizer = dp.optimizers.DPAdam(
        **values,
        beta_2=0.99,
        second_moment=dp.optimizers.moments.BiasCorrected(floor=1.0),
        clip_norm=1.0,
        batch_size=size,
        noise_multiplier=records.noise(private, batch_size(private), STEPS, epsilon, DELTA)
        * size
        / batch_size(private),
        average_from=STEPS // 2,
    )
    model = classifier(method, weights)
    model.compile(optimizer, LOSS, physical_batch_size=512)
    model.fit(dp.data.poisson_batches(rows, size, STEPS, unit="picture"), verbose=0)
    return model


def main():
    parser = records.options(__doc__, "fine_tuning", EPSILONS)
    parser.set_defaults(trials=6)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parser.parse_args()
    weights = options.output / "glyphs.weights.h5"
    if not weights.exists():
        glyphs = drawings.glyphs()
        draw = functools.partial(drawings.variants, glyphs)
        drawings.pretrain(weights, network, draw, len(glyphs), GLYPHS, EPOCHS)
    if options.quick:
        options.epsilons, options.seeds, options.trials = [3.0], 2, 2
        options.output /= "quick"
    every, test = fashion()
    public, private = (records.at(every, rows) for rows in
                       records.public_and_private(len(every[1]), PUBLIC))  # fmt: skip
    if options.quick:
        private = records.at(private, slice(10_000))
    settings = dp.tuning.candidate("ViT", "DPAdam", space=SPACE).draw(options.trials)

    def trial(method, epsilon, values, fold):
        rows, left_out = records.fold_of(public, fold, FOLDS)
        model = train(method, weights, rows, epsilon, values, fold, stands_for=len(private[1]))
        return records.accuracy(model, left_out)

    chosen = {
        method: records.chosen(
            options.output / f"trials-{method.replace(' ', '-')}.csv",
            functools.partial(trial, method), options.epsilons, settings, FOLDS,
        )
        for method in options.methods
    }  # fmt: skip

    def run(method, epsilon, seed):
        values = chosen[method][epsilon]
        model = train(method, weights, private, epsilon, values, seed)
        trained = sum(int(np.prod(variable.shape)) for variable in model.trainable_weights)
        spent = model.ledger.epsilon(DELTA)
        return values | {"trained": trained, "spent": spent, "score": records.accuracy(model, test)}

    rows = results.completed(
        options.output / "results.csv", ("method", "epsilon", "seed"),
        itertools.product(options.methods, options.epsilons, range(options.seeds)), run,
    )  # fmt: skip
    records.picture(rows, "fine-tuning", "test accuracy, %",
                    options.output / "records_fine_tuning.png",
                    "Fashion-MNIST, a small Vision Transformer, δ = 1e-5")  # fmt: skip
    text = records.table(rows, 2)
    (options.output / "fine_tuning.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
