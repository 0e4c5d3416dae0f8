"""Pictures that are drawn, not photographed: characters of fonts, and things that do not exist.

They stand in for public data. What is learned from them, or computed from them, has seen nobody's
pictures, and needs no file of weights: whoever runs the recipe has them.
"""

import functools
import pathlib

import keras
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

CHARACTERS = [
    chr(code)
    for first, last in ((33, 126), (0x391, 0x3C9), (0x410, 0x44F))  # Latin, Greek, Cyrillic
    for code in range(first, last + 1)
    if chr(code).isprintable()  # some places are empty
]
CANVAS = 40  # pixels, of which a picture shows the middle


@functools.cache
def glyphs():
    """Pictures of the characters, for each a list of one from every font.

    Of characters that look alike, such as a Latin and a Greek A, one is taken.
    """
    folder = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = [path for path in sorted(folder.glob("DejaVuS*.ttf")) if "Display" not in path.name]

    def picture(font, character):
        canvas = Image.new("L", (CANVAS, CANVAS))
        ImageDraw.Draw(canvas).text((CANVAS / 2, CANVAS / 2), character, 255, font, anchor="mm")
        return canvas

    fonts = [ImageFont.truetype(path, 28) for path in paths]
    distinct = {picture(fonts[0], character).tobytes(): character for character in CHARACTERS}
    return [[picture(font, character) for font in fonts] for character in distinct.values()]


def things(count, seed=0, size=28):
    """One thing on black in each picture, values from 0 to 1.

    A thing is a union of ellipses and rectangles about the middle, mostly mirrored, some of another
    shade; then parts that are cut out or shaded, stripes, a grain, and a slight blur.
    """
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] - (size - 1) / 2

    def shape(places, sizes, upright, mirrored):
        (left, top), (width, height) = generator.normal(0, places), generator.uniform(*sizes)
        angle = 0 if generator.uniform() < upright else generator.uniform(0, np.pi)
        along = (x - left) * np.cos(angle) + (y - top) * np.sin(angle)
        across = (y - top) * np.cos(angle) - (x - left) * np.sin(angle)
        power = generator.choice([2, 4, 8])  # from an ellipse to a rectangle
        inside = np.abs(along / width) ** power + np.abs(across / height) ** power < 1
        return inside | inside[:, ::-1] if mirrored else inside

    pictures = np.zeros((count, size, size, 1), np.float32)
    for picture in pictures[..., 0]:
        mirrored, shade = generator.uniform() < 0.7, generator.uniform(0.15, 1)
        thing = np.zeros((size, size), bool)
        for _ in range(generator.integers(1, 6)):
            part = shape((5, 6), ((2, 2), (12, 14)), 0.67, mirrored)
            other = generator.normal(0, 0.2) * (generator.uniform() < 0.6)
            in_front = generator.uniform() < 0.4
            picture[part if in_front else part & ~thing] = np.clip(shade + other, 0.05, 1)
            thing |= part
        for _ in range(generator.integers(0, 4)):
            part = shape((6, 8), ((1, 1), (5, 8)), 0.5, mirrored)
            picture[part & thing] *= generator.choice([0, 0.5, 1.4])
        if generator.uniform() < 0.5:
            angle = generator.choice([0, np.pi / 2, generator.uniform(0, np.pi)])
            wave = generator.uniform(0.3, 2.8) * (np.cos(angle) * x + np.sin(angle) * y)
            picture *= 1 + generator.uniform(0, 0.5) * np.sin(wave + generator.uniform(0, 6))
        grain = ndimage.gaussian_filter(
            generator.standard_normal((size, size)), generator.uniform(0.4, 2)
        )
        picture += generator.uniform(0, 0.3) * grain
        picture[:] = ndimage.gaussian_filter(np.clip(picture * thing, 0, 1), 0.4)
    return pictures


def as_kinds(pictures):
    """Each picture on a canvas, as a kind of which there is this one."""
    margin = (CANVAS - pictures.shape[1]) // 2
    padded = np.pad(np.uint8(255 * pictures[..., 0]), ((0, 0), (margin, margin), (margin, margin)))
    return [[Image.fromarray(canvas)] for canvas in padded]


def moved(source, generator, size):
    """The middle of a picture of Pillow's, turned, sheared, scaled and shifted at random."""
    angle, slant = generator.normal(0, (0.2, 0.1))
    scales = 1.1 * np.exp(generator.normal(0, 0.2, 2))
    turned = [[np.cos(angle), -np.sin(angle)], [np.sin(angle) + slant, np.cos(angle)]]
    matrix = turned * scales[:, None]
    start = source.width / 2 - matrix @ (size / 2 + generator.uniform(-3, 3, 2))
    coefficients = np.column_stack([matrix, start]).ravel().tolist()
    return np.asarray(
        source.transform(
            (size, size), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR
        )
    )


def variants(kinds, count, seed=0, size=28):
    """Kinds at random, turned, sheared, scaled, shifted, and in random shades.

    Args:
        kinds: for each a list of canvases.
        count: how many pictures.
        seed: of all choices.
        size: of the pictures.

    Returns:
        Pictures, values from 0 to 1, and their kinds.
    """
    generator = np.random.default_rng(seed)
    chosen = generator.integers(0, len(kinds), count)
    pictures = np.empty((count, size, size, 1), np.float32)
    for picture, kind in zip(pictures[..., 0], chosen, strict=True):
        source = kinds[kind][generator.integers(len(kinds[kind]))]
        ink = moved(source, generator, size)
        shade, ground = generator.uniform(size=2)
        if abs(shade - ground) < 0.3 or generator.uniform() < 0.5:
            shade, ground = generator.uniform(0.4, 1), 0
        picture[:] = ground + (shade - ground) * ink / 255
    return pictures, np.int32(chosen)


def pretrain(path, network, draw, kinds, pictures, epochs):
    """Trains a network to tell kinds apart, without privacy, and writes its weights.

    Args:
        path: of the weights.
        network: function that makes the model to be kept, and the tensor that a new linear layer
            tells the kinds by.
        draw: function of a number and a seed that returns so many pictures, and their kinds.
        kinds: how many there are.
        pictures: how many are drawn anew for each epoch.
        epochs: how many.
    """
    print(f"{path.name}: pre-training, some minutes", flush=True)
    keras.utils.set_random_seed(0)
    body, found = network()
    logits = keras.layers.Dense(kinds)(keras.layers.Flatten()(found))
    model = keras.Model(body.input, logits)
    batch = min(128, pictures)
    steps = epochs * (pictures // batch)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=2e-3, warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.AdamW(rate, 0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    for epoch in range(epochs):
        model.fit(*draw(pictures, epoch), batch_size=batch, verbose=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    body.save_weights(path)
