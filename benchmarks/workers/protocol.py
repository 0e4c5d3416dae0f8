"""How `compare.py` speaks with a worker: one JSON object a line, over standard input and output.

    {"workload": "mlp", "variant": "ghost", "batch_size": 256, "device": "cpu"}
        → {"parameters": 669706, "versions": {"torch": ...}, "milliseconds": of a step, roughly}
    {"steps": 20}
        → {"milliseconds": of a step, "peak_megabytes": of the process so far}

Whatever fails is answered by {"error": "why"}. At the end of its input a worker stops.
"""

import importlib.metadata
import json
import os
import re
import sys
import time


def serve(prepare, packages, peak_megabytes=None):
    """Answers requests until the input ends.

    Args:
        prepare: function of (workload, variant, batch_size, device) that gives a function `run` of
            a number of steps, which gives the milliseconds of one, and the parameter count.
        packages: distributions whose versions are stated.
        peak_megabytes: function of the device, instead of the resident memory of the process.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not end up between the replies
    run = device = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "steps" in request:
                reply = {"milliseconds": run(request["steps"])}
                reply["peak_megabytes"] = (peak_megabytes or resident_peak)(device)
            else:
                device = request["device"]
                run, parameters, *state = prepare(**request)
                run(1)  # traces and compiles
                versions = {name: importlib.metadata.version(name) for name in packages}
                reply = {"parameters": int(parameters), "versions": versions}
                reply["milliseconds"] = run(1)
                reply["optimizer_megabytes"] = state[0]() if state else None
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {telling_line(str(error))}"}
        print(json.dumps(reply), file=replies, flush=True)


def telling_line(message):
    """The line of an error's text that says what was wrong; TensorFlow's is seldom the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    return next((line for line in lines if re.search("Error: |OOM|allocat", line)), lines[0])


def resident_peak(device=None):
    """High-water mark of this process's memory in MB (a child's ru_maxrss is its parent's)."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def timed(step, wait=lambda result: None):
    """The `run` of a function that makes one step; `wait` blocks until its result is there."""

    def run(steps):
        wait(step())
        start = time.perf_counter()
        for _ in range(steps):
            result = step()
        wait(result)
        return 1e3 * (time.perf_counter() - start) / steps

    return run
