"""What ends while batches are made ends: a script does not hang or crash, a pass does not wait."""

import subprocess
import sys

import numpy as np
import pytest

import dp_keras_opt as dp

START = """
import time
import keras, numpy as np
import dp_keras_opt as dp

class Slow:
    is_thread_safe = {threads}
    def __len__(self):
        return 64
    def __getitem__(self, indices):
        time.sleep(0.2)
        return np.ones((len(indices), 3), "float32"), np.zeros(len(indices), "float32")

batches = dp.data.poisson_batches(Slow(), batch_size=8, steps_per_epoch=1000)
"""

ITERATOR = """
iterator = iter(batches.dataset)
next(iterator)
"""

FIT = """
class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt

model = dp.DPModel(i := keras.Input((3,)), keras.layers.Dense(1)(i))
model.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=8), "mse")
model.fit(batches, callbacks=[Stops()], verbose=0)
"""


@pytest.mark.parametrize("threads", [False, True], ids=["alone", "threads"])
@pytest.mark.parametrize("program", [ITERATOR, FIT], ids=["iterator", "interrupted-fit"])
def test_a_script_ends_while_batches_are_made(program, threads):
    code = START.format(threads=threads) + program + "print('the last line', flush=True)\n"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)  # it would hang
    if program is ITERATOR:
        assert run.stdout.splitlines()[-1] == "the last line"
        assert run.returncode == 0, run.stderr[-2000:]
    else:
        assert "KeyboardInterrupt" in run.stderr
        assert run.returncode in (1, 130, -2)


def test_no_pass_waits_for_the_tuning_of_its_pipeline():
    # TensorFlow's thread for it, of which we have no use, often sleeps on when an iterator is
    # deleted: for as long as it has run, and up to a minute, at the end of each epoch.
    x, y = np.zeros((40, 3), "float32"), np.zeros(40, "float32")
    drawn = dp.data.poisson_batches((x, y), batch_size=8)
    public = dp.data.with_public(drawn, (x, y))
    for batches in (drawn, drawn.map(lambda x, y: (2 * x, y)), public):
        assert not batches.dataset.options().autotune.enabled
