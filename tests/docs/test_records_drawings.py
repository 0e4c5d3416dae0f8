"""Pictures that are drawn: what they show, that they come again, and the pre-training on them."""

import functools

import keras
import numpy as np
import pytest

from tests.helpers.examples import imported


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("PIL")
    return imported("drawings", monkeypatch)


def test_characters_are_distinct(script):
    glyphs = script.glyphs()
    assert len({of_fonts[0].tobytes() for of_fonts in glyphs}) == len(glyphs) > 150
    assert all(of_fonts[0].getbbox() for of_fonts in glyphs)  # none is blank


def test_things_are_on_black_and_mostly_mirrored(script):
    x = script.things(300)
    assert x.shape == (300, 28, 28, 1) and x.dtype == np.float32
    assert x.min() >= 0 and x.max() <= 1
    assert np.mean(x.max(axis=(1, 2, 3)) > 0.1) > 0.99  # few are nearly black
    assert 0.2 < np.mean(x == 0) < 0.8
    outline = x[..., 0] > 0.02
    alike = np.mean(outline == outline[:, :, ::-1], axis=(1, 2))
    assert 0.55 < np.mean(alike > 0.97) < 0.9  # 0.7 of them are drawn so
    np.testing.assert_array_equal(script.things(5), x[:5])
    assert not np.array_equal(script.things(5, seed=1), x[:5])


def test_variants_show_their_kind(script):
    """A picture of one kind is white where those of the other are black."""
    halves = np.zeros((2, 28, 28, 1), np.float32)
    halves[0, :8], halves[1, 20:] = 1, 1
    kinds = script.as_kinds(halves)
    x, chosen = script.variants(kinds, 400)
    assert x.shape == (400, 28, 28, 1) and x.min() >= 0 and x.max() <= 1
    assert set(chosen) == {0, 1}
    on_black = x.min(axis=(1, 2, 3)) == 0
    assert 0.5 < on_black.mean() < 0.9
    difference = x[:, :10].mean(axis=(1, 2, 3)) - x[:, 18:].mean(axis=(1, 2, 3))
    told = (difference < 0) == (chosen == 1)
    assert told[on_black].mean() > 0.97
    np.testing.assert_array_equal(script.variants(kinds, 400)[0], x)
    assert not np.array_equal(script.variants(kinds, 400, 1)[0], x)


def test_what_is_pretrained_tells_kinds_apart(script, tmp_path):
    def network():
        pictures = keras.Input((28, 28, 1))
        found = keras.layers.Dense(16, "relu")(keras.layers.Flatten()(pictures))
        body = keras.Model(pictures, found)
        made.append(body)
        return body, found

    made = []
    halves = np.zeros((2, 28, 28, 1), np.float32)
    halves[0, :8], halves[1, 20:] = 1, 1
    path = tmp_path / "folder" / "b.weights.h5"
    draw = functools.partial(script.variants, script.as_kinds(halves))
    script.pretrain(path, network, draw, 2, 1280, 3)
    body, _ = network()
    assert not np.array_equal(body.get_weights()[0], made[0].get_weights()[0])
    body.load_weights(path)
    for kept, trained in zip(body.get_weights(), made[0].get_weights(), strict=True):
        np.testing.assert_array_equal(kept, trained)
    x, kinds = script.variants(script.as_kinds(halves), 400, seed=9)
    vectors = np.c_[body.predict(x, verbose=0), np.ones(400)]
    fitted, *_ = np.linalg.lstsq(vectors, 2.0 * kinds - 1, rcond=None)
    assert np.mean((vectors @ fitted > 0) == kinds) > 0.8


def test_clothes_are_told_apart_by_their_outline(monkeypatch):
    """The nearest mean tells most kinds; shoes lie low and broad, trousers have a gap."""
    script = imported("drawn_clothes", monkeypatch)
    x, kinds = script.clothes(1500)
    assert x.shape == (1500, 28, 28, 1) and x.min() >= 0 and x.max() <= 1
    np.testing.assert_array_equal(np.unique(kinds), np.arange(10))
    assert np.mean(x.max(axis=(1, 2, 3)) > 0.1) > 0.99
    outline = np.float32(x > 0.02).reshape(len(x), -1)
    means = np.stack([outline[kinds == kind].mean(0) for kind in range(10)])
    distance = ((outline[:, None] - means) ** 2).sum(-1)
    assert np.mean(distance.argmin(1) == kinds) > 0.6
    again, of_again = script.clothes(1500)
    np.testing.assert_array_equal(again, x)
    np.testing.assert_array_equal(of_again, kinds)
    assert not np.array_equal(script.clothes(1500, 1)[0], x)
    assert script.gallery(4).shape == (10 * 28, 4 * 28)
    for name in ("trouser", "sneaker", "sandal"):
        rows, columns = (
            means[[kind.__name__ for kind in script.KINDS].index(name)].reshape(28, 28).mean(axis)
            for axis in (1, 0)
        )
        if name == "trouser":
            assert columns[13:15].mean() < columns[10:13].mean()
        else:
            assert rows[:8].max() < 0.15 and columns[4:24].min() > 0.1
