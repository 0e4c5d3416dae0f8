"""The secret file that hands a run of correlated noise over to another process.

It holds past noise: whoever has it and a released gradient has the raw sum. It exists once: who
saves it stops using the run, and who resumes from it deletes it, so that no noise serves twice.
"""

import os
import pathlib
from typing import NamedTuple

import numpy as np

from dp_keras_opt import files, workers
from dp_keras_opt.accounting.segment import conditions_of, stated

SUFFIX = ".secret.npz"
_WARNING = "SECRET: past noise. With a released gradient it gives the raw sum. Never publish it."


class SavedRun(NamedTuple):
    """A run of correlated noise between two steps."""

    run: str  # name of its segment in the ledger
    steps: int  # how many of it were taken
    order_seed: int | None  # of the examples; see `data.Batches`
    memories: dict  # stream -> its buffers, float32 (size,)


def write(path, saved):
    """Writes a new file that only its owner can read.

    Raises:
        ValueError: the name does not end in ".secret.npz".
        OSError: the file exists, or cannot be written; none is left behind then.
    """
    path = _checked(path)
    arrays = {
        f"{index}.{part}.{position}": buffer
        for (index, part), buffers in saved.memories.items()
        for position, buffer in enumerate(buffers)
    }
    order_seed = "" if saved.order_seed is None else str(saved.order_seed)
    header = np.array([_WARNING, saved.run, str(saved.steps), order_seed])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, header=header, **arrays)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()
        raise


def read(path):
    """The `SavedRun` in a file that `write` made.

    Raises:
        ValueError: it is no such file.
    """
    path = _checked(path)
    with np.load(path, allow_pickle=False) as stored:
        content = {name: stored[name] for name in stored.files}
    header = content.pop("header", None)
    if header is None or header[0] != _WARNING:
        raise ValueError(f"{path} is no file of DPModel.save_run.")
    memories = {}
    for name in content:
        index, part, _ = map(int, name.split("."))
        memories.setdefault((index, part), []).append(content[name])
    _, run, steps, order_seed = header.tolist()
    return SavedRun(run, int(steps), int(order_seed) if order_seed else None, memories)


def delete(path):
    """Removes the file, for good: another process cannot resume from it as well."""
    path = _checked(path)
    path.unlink()
    files.sync_directory(path.parent)  # or a crash of the machine could bring the file back


def save(model, guard, path):
    """Hands the current run of a model over to a file; see `DPModel.save_run`."""
    _refuse_workers(model)
    ledger, optimizer = guard.ledger(model), model.optimizer
    segment = ledger.current
    if segment is None or not optimizer.noise.is_correlated or not segment.steps:
        raise ValueError(
            "There is no run to save: only correlated noise, once training has begun, has a "
            "past that the next steps need. Save the model."
        )
    if segment.breaks_off:
        raise ValueError(
            f"The run broke off after {segment.steps} steps, which are no whole rounds of "
            f"{segment.sampling.period}: its batches cannot go on as accounted."
        )
    memories = optimizer.noise_source.memory.state()
    write(path, SavedRun(segment.run, segment.steps, guard.order_seed, memories))
    ledger.close()
    optimizer.noise_source.memory.reset()


def resume(model, guard, path):
    """Takes a run over from a file, for the next step, and deletes it; see `DPModel.resume_run`."""
    _refuse_workers(model)
    saved = read(path)
    guard.ledger(model).segment(saved.run, saved.steps)
    delete(path)
    guard.resumed = saved
    return saved.order_seed


def go_on(saved, ledger, sampling, order_seed, filter, model):
    """Makes a saved run that of the next steps, if they are as they were.

    Returns:
        The new name of the run in the ledger.

    Raises:
        ValueError: noise, its schedule or the place in it, clip norm, sampling, the order of the
            examples or the filter of the budget differ.
    """
    optimizer = model.optimizer
    segment, conditions = ledger.segment(saved.run, saved.steps), conditions_of(optimizer, sampling)
    different = [
        name
        for name, before, now in (
            ("releases (noise)", segment.releases, optimizer.releases),
            ("noise schedule", segment.schedule, optimizer.noise_schedule),
            ("number of steps", segment.last_step, int(optimizer.iterations.numpy())),
            ("clip norm", segment.clip_norm, stated(optimizer.clip_norm)),
            ("sampling", segment.sampling, sampling),
            ("seed, or way to state the sampling", segment.conditions, conditions),
            ("order_seed of the data", saved.order_seed, order_seed),
            ("privacy filter (of its PrivacyBudget)", segment.filter, filter),
        )
        if before != now
    ]
    if filter is not None and segment != [each for each in ledger.segments if each.steps][-1]:
        raise ValueError(
            "Other steps ran since the run was saved. Under a privacy filter a run goes on only "
            "where it was the last, since what began after it counted its steps as they were. "
            "Compile the model anew, which begins a new run."
        )
    if different:
        raise ValueError(
            f"The resumed run had another {' and another '.join(different)}. Go on as it was, "
            "with what resume_run returned as the data's order_seed; or compile the model "
            "anew, which begins a new run."
        )
    optimizer.ensure_built(model.trainable_variables)
    optimizer.noise_source.memory.load(saved.memories, saved.steps)
    ledger.resume(saved.run, saved.steps)
    return ledger.current.run


def _refuse_workers(model):
    if workers.place(model.distribute_strategy)[1] > 1:
        raise ValueError(
            "A run of correlated noise cannot be handed over by several workers: each would "
            "write the same secret. Train within one process, or begin a new run."
        )


def _checked(path):
    if not str(path).endswith(SUFFIX):
        raise ValueError(
            f"The file holds past noise and must be kept secret: give it a name that ends in "
            f"{SUFFIX!r}; received {str(path)!r}."
        )
    return pathlib.Path(path)
