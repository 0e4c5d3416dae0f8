"""Folders of pictures or texts, one for each class, as Keras finds them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import index_directory
from dp_keras_opt.types import Map, Path

#: What `keras.utils.image_dataset_from_directory` finds.
_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")


class Folder:
    """Files of a folder as a source of (content, class), which is decoded when it is read.

    Attributes:
        class_names: the names of the sub-folders, in the order of the classes.
        file_paths: the files, in order.
    """

    is_thread_safe = True
    class_names: tuple[str, ...]
    file_paths: tuple[str, ...]

    def __init__(
        self, paths: np.ndarray, labels: Any, class_names: tuple[str, ...], decode: Map
    ) -> None:
        self.class_names, self.file_paths = class_names, tuple(paths)
        self._paths, self._labels = paths, labels
        #: What makes an example of a path, compiled by TensorFlow; applied before any `map`.
        self.decode = lambda path, *label: (decode(path), *label)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, indices: np.ndarray) -> Any:
        rows = (self._paths[indices],)
        return rows if self._labels is None else (*rows, self._labels[indices])


def image_folder(
    directory: Path,
    *,
    labels: Any = "inferred",
    label_mode: str = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    image_size: tuple[int, int] = (256, 256),
    interpolation: str = "bilinear",
    crop_to_aspect_ratio: bool = False,
    pad_to_aspect_ratio: bool = False,
) -> Folder:
    """Pictures in a folder for each class, read and decoded when they are drawn.

    Finds, decodes and resizes what `keras.utils.image_dataset_from_directory` does, with the same
    arguments: .jpg, .jpeg, .png, .bmp and .gif files; pixels are float32 from 0 to 255.

    Args:
        directory: with a sub-folder for each class, or with the files where `labels` is a list.
        labels: "inferred", from the sub-folders; or a list of integers, one for each file in the
            order of their sorted paths; or None: examples are pictures alone, for `map`.
        label_mode: "int", "binary" (float32 [1]) or "categorical" (one-hot), as in Keras.
        class_names: the sub-folders in the order of the classes; default: sorted.
        color_mode: "rgb", "rgba" or "grayscale".
        image_size: (height, width) that all are resized to.
        interpolation: how, a method of `tf.image.resize`.
        crop_to_aspect_ratio, pad_to_aspect_ratio: whether the picture keeps its proportions, and
            is cut or has black borders; at most one of them.

    Returns:
        A source for the samplers of `dp.data`, of (picture, class).

    Raises:
        ValueError: as Keras; there are no pictures.
    """
    channels = {"rgb": 3, "rgba": 4, "grayscale": 1}.get(color_mode)
    if channels is None:
        raise ValueError(
            f"color_mode must be 'rgb', 'rgba' or 'grayscale'; received {color_mode!r}."
        )
    if crop_to_aspect_ratio and pad_to_aspect_ratio:
        raise ValueError("Only one of crop_to_aspect_ratio and pad_to_aspect_ratio can be True.")
    paths, classes, names = _files(directory, labels, class_names, _PICTURES)

    def decode(path):
        image = tf.io.decode_image(tf.io.read_file(path), channels, expand_animations=False)
        if crop_to_aspect_ratio:
            image = keras.preprocessing.image.smart_resize(image, image_size, interpolation)
        elif pad_to_aspect_ratio:
            image = tf.image.resize_with_pad(image, *image_size, method=interpolation)
        else:
            image = tf.image.resize(image, image_size, method=interpolation)
        return tf.ensure_shape(image, (*image_size, channels))

    return Folder(paths, _labels(classes, names, label_mode), names, decode)


def text_folder(
    directory: Path,
    *,
    labels: Any = "inferred",
    label_mode: str = "int",
    class_names: Sequence[str] | None = None,
) -> Folder:
    """Texts in a folder for each class, read when they are drawn.

    Finds what `keras.utils.text_dataset_from_directory` does, with the same arguments: .txt files,
    each a string.

    Args:
        directory, labels, label_mode, class_names: as for `image_folder`.

    Returns:
        A source for the samplers of `dp.data`, of (text, class).

    Raises:
        ValueError: as Keras; there are no texts.
    """
    paths, classes, names = _files(directory, labels, class_names, (".txt",))
    return Folder(paths, _labels(classes, names, label_mode), names, tf.io.read_file)


def _files(directory, labels, class_names, formats):
    """(paths, classes, names of the classes), found and sorted by Keras."""
    paths, classes, names = index_directory(
        os.fspath(directory), labels, formats, class_names=class_names, shuffle=False, verbose=False
    )
    if not paths:
        raise ValueError(f"There are no files of the kinds {list(formats)} in {directory}.")
    return np.array(paths, object), classes, tuple(names or ())


def _labels(classes, names, label_mode):
    """The class of each file, in the form that Keras gives it."""
    if classes is None:
        return None
    labels = np.asarray(classes, np.int32)
    if label_mode == "int":
        return labels
    if label_mode == "binary":
        return labels[:, None].astype(np.float32)
    if label_mode == "categorical":
        return keras.utils.to_categorical(labels, max(len(names), labels.max() + 1))
    raise ValueError(
        f"label_mode must be 'int', 'binary' or 'categorical'; received {label_mode!r}."
    )
