"""Who is compared, what each installs, and the processes that train them."""

import json
import os
import pathlib
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

from workloads import REAL, WORKLOADS

BENCHMARKS = pathlib.Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent

#: What pip installs into each environment, call by call: for the CPU, and other words for GPUs.
REQUIREMENTS = {
    "keras": [["-e", f"{REPOSITORY}[plots]", "tensorflow==2.21.0", "keras==3.15.1"]],
    "tf_privacy": [
        ["tensorflow==2.21.0", "tf_keras==2.21.0", "dp-accounting==0.6.0", "dm-tree==0.1.10"],
        ["tensorflow-privacy==0.9.0", "--no-deps"],
    ],
    "opacus": [["torch==2.13.0", "torchvision==0.28.0", "opacus==1.6.0"]],
    "jax_privacy": [["jax==0.10.2", "jaxlib==0.10.2", "jax-privacy==2.0.0"]],
}

_FOR_GPUS = {"tensorflow==": "tensorflow[and-cuda]==", "jax==": "jax[cuda12]=="}  # PyPI's torch is


def requirements(name, device):
    """The words of each call of pip for an environment."""
    replaced = _FOR_GPUS if device == "gpu" else {}

    def word_for(word):
        found = next((start for start in replaced if word.startswith(start)), None)
        return word.replace(found, replaced[found]) if found else word

    return [[word_for(word) for word in words] for words in REQUIREMENTS[name]]


class Contender(NamedTuple):
    """A variant of a worker (`workers/`), with the name of its environment."""

    worker: str
    variant: str
    label: str
    environment: str

    @property
    def name(self):
        return f"{self.worker}:{self.variant}"


CONTENDERS = [
    Contender("keras_plain", "plain", "Keras, not private", "keras"),
    Contender("keras_plain", "xla", "Keras, not private, XLA", "keras"),
    Contender("keras_plain", "noise", "the draw of the noise alone", "keras"),
    Contender("dp_keras", "dpsgd", "this library, DP-SGD", "keras"),
    Contender("dp_keras", "post_processing", "this library, post-processing", "keras"),
    Contender("dp_keras", "post_processing+xla", "this library, post-processing, XLA", "keras"),
    Contender("dp_keras", "scale_then_privatize", "this library, scale-then-privatize", "keras"),
    Contender("dp_keras", "dp2rmsprop", "this library, DP²-RMSprop, adaptive phase", "keras"),
    Contender("dp_keras", "dpsgd+f1", "this library, DP-SGD, filter of order 1", "keras"),
    Contender("dp_keras", "dpsgd+f6", "this library, DP-SGD, filter of order 2", "keras"),
    Contender("dp_keras", "dpsgd+bands16", "this library, DP-SGD, noise of 16 bands", "keras"),
    Contender("dp_keras", "dpsgd+secure", "this library, DP-SGD, secure noise", "keras"),
    Contender("dp_keras", "galore", "this library, DP-GaLore of rank 32", "keras"),
    Contender("dp_keras", "post_processing+disk", "this library, DiSK, one pass", "keras"),
    Contender("dp_keras", "post_processing+disk2", "this library, DiSK, two passes", "keras"),
    Contender("dp_keras", "post_processing+fftkf", "this library, FFTKF, one pass", "keras"),
    Contender("dp_keras", "post_processing+momenta", "this library, DP-PMLF, two passes", "keras"),
    Contender("dp_keras", "post_processing+sharpness", "this library, DP-SAT", "keras"),
    Contender("dp_keras", "post_processing+mean", "this library, around the mean", "keras"),
    Contender("dp_keras", "post_processing+adaclip", "this library, AdaClip", "keras"),
    Contender("dp_keras", "post_processing+geoclip", "this library, GeoClip of rank 8", "keras"),
    Contender("dp_keras", "post_processing+kronecker", "this library, DP-KFC", "keras"),
    Contender("dp_keras", "muon", "this library, DP-Muon", "keras"),
    Contender("dp_keras", "muon+corrected", "this library, DP-Muon, bias-corrected", "keras"),
    Contender("keras_plain", "plain+two", "Keras, not private, two devices", "keras"),
    Contender("dp_keras", "dpsgd+two", "this library, DP-SGD, two devices", "keras"),
    Contender("tf_privacy", "vectorized", "TF Privacy, vectorized optimizer", "tf_privacy"),
    Contender("tf_privacy", "model", "TF Privacy, DPModel (XLA)", "tf_privacy"),
    Contender("tf_privacy", "fast", "TF Privacy, fast clipping (XLA)", "tf_privacy"),
    Contender("opacus", "plain", "PyTorch, not private", "opacus"),
    Contender("opacus", "hooks", "Opacus, hooks", "opacus"),
    Contender("opacus", "ghost", "Opacus, ghost clipping", "opacus"),
    Contender("jax_privacy", "plain", "JAX, not private", "jax_privacy"),
    Contender("jax_privacy", "vectorized", "jax-privacy, whole batch", "jax_privacy"),
    Contender("jax_privacy", "one_by_one", "jax-privacy, microbatches of 1", "jax_privacy"),
]

#: Workers that have no models of the group REAL.
SMALL_ONLY = ("tf_privacy", "jax_privacy")

#: Environment variables of the workers on each device.
SETTINGS = {
    "cpu": {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
    "gpu": {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    },
}  # fmt: skip


def number_of_gpus():
    """How many GPUs the driver of this machine lists."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def say(text):
    print(text, file=sys.stderr, flush=True)


def folder_of(name, device):
    return REPOSITORY / ".bench" / (name if device == "cpu" else f"{name}-{device}")


def commands_for(name, device):
    """The commands that make an environment."""
    root = folder_of(name, device)
    yield [sys.executable, "-m", "venv", "--clear", root]
    for words in requirements(name, device):
        yield [root / "bin" / "python", "-m", "pip", "install", *words]


def environment(name, device="cpu"):
    """The Python of an environment, which is made first where it is missing or out of date."""
    root = folder_of(name, device)
    python, made_of = root / "bin" / "python", root / "made_of.json"
    wanted = json.dumps([sys.version, requirements(name, device)])
    if not made_of.exists() or made_of.read_text() != wanted:
        say(f"making the environment {root.name}")
        for command in commands_for(name, device):
            subprocess.run(command, check=True, capture_output=True, text=True)
        made_of.write_text(wanted)
    return python


def pythons(contenders, here, device="cpu"):
    """The Python of each environment that the contenders need; a string says why there is none."""
    found = {}
    for name in dict.fromkeys(contender.environment for contender in contenders):
        try:
            found[name] = pathlib.Path(sys.executable) if here else environment(name, device)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout or str(error)).strip().splitlines()
            found[name] = f"its environment could not be made: {lines[-1]}"
    return found


class Worker:
    """A process that trains one contender, and what it answered (see `workers/protocol.py`).

    It may take what memory is available when it starts, less 1 GB, and is the first to be ended
    where the machine runs out. After an error it is asked nothing more.

    Args:
        contender: a `Contender`.
        python: the Python that runs it, or a string that says why there is none.
        workload, batch_size: what it trains.
        device: "cpu" or "gpu".
        limit: seconds to wait for an answer.

    Attributes:
        milliseconds: of a step, one number a round.
        peak_megabytes: the most memory it took.
        optimizer_megabytes: of the optimizer's variables, where the worker tells.
        versions: of its libraries.
        error: why it has no numbers, or "".
    """

    def __init__(self, contender, python, workload, batch_size, device, limit):
        self.contender, self._limit, self._process = contender, limit, None
        self.milliseconds, self.peak_megabytes, self.versions = [], None, {}
        self.error = python if isinstance(python, str) else ""
        if workload in REAL and contender.worker in SMALL_ONLY:
            self.error = "not built for it"
        if self.error:
            return
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", f"workers.{contender.worker}"],
            cwd=BENCHMARKS,
            env=os.environ | SETTINGS[device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=_limit_memory if device == "cpu" else None,
        )
        ready = self._ask(
            workload=workload, variant=contender.variant, batch_size=batch_size, device=device
        )
        self.optimizer_megabytes = None
        if ready:
            self.optimizer_megabytes = ready["optimizer_megabytes"]
            self.versions, self._first = ready["versions"], ready["milliseconds"]
            expected = WORKLOADS[workload].parameters_in(contender.worker)
            if ready["parameters"] != expected:
                self.error = f"its model has {ready['parameters']} parameters"

    def time(self, steps, seconds):
        """One round of so many steps, or of fewer where they would take longer than `seconds`."""
        if self.error:
            return
        affordable = int(1e3 * seconds / min([self._first, *self.milliseconds]))
        reply = self._ask(steps=max(1, min(steps, affordable)))
        if reply:
            self.milliseconds.append(reply["milliseconds"])
            self.peak_megabytes = reply["peak_megabytes"]

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()

    def _ask(self, **request):
        """The reply to a request; None if there is none, and why is then in `error`."""
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answered, _, _ = select.select([self._process.stdout], [], [], self._limit)
            line = self._process.stdout.readline() if answered else ""
        except BrokenPipeError:
            answered, line = True, ""
        if line:
            reply = json.loads(line)
            self.error = reply.get("error", "")
        else:
            self.error = self._cause_of_death() if answered else f"no answer in {self._limit:g} s"
        if re.search("out of memory|allocat|bad_alloc", self.error, re.IGNORECASE):
            self.error = "out of memory"
        self.error = self.error[:120]
        return None if self.error else reply

    def _cause_of_death(self):
        status = self._process.wait()
        if -status in (signal.SIGKILL, signal.SIGTERM):
            return f"ended from outside by {signal.Signals(-status).name}"
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()] or ["no message"]
        return f"ended with status {status}: {lines[-1]}"


def _limit_memory():
    """For a new process: its limit on memory, and its place in the order of who is ended first."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        (available,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limit = 1024 * max(available - 2**20, 2**20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
