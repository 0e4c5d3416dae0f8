"""What was planned where results may have stopped it: the guarantee of a plan.

Whoever stops when the results are good, or bad, chooses the number of steps by looking at what they
released, and no fixed number of steps prices that. What was planned beforehand bounds it: at the
time of each plan, what had been done before and the whole of the plan.
"""

import dataclasses
import math


def is_unknown(segment):
    """Whether results may have stopped the segment, and how long it was to be is not known."""
    return math.isinf(segment.planned_steps)


def scenarios(segments):
    """The histories that were planned at some time; the dearest of them bounds what happened.

    Args:
        segments: iterable of `segment.Segment` with steps.

    Returns:
        A list of lists of segments, whose `steps` are those planned. Of a plan that is not known
        (`is_unknown`) the steps that ran count.
    """
    segments = list(segments)
    over = {state for segment in segments for state in segment.after}
    times = [segment for segment in segments if segment.steps < segment.planned_steps < math.inf]

    def planned(segment, time):
        ended = segment.state in (over if time is None else time.after)
        steps = segment.steps if ended or is_unknown(segment) else segment.planned_steps
        return dataclasses.replace(segment, steps=steps)

    def history(time):
        return [
            planned(segment, time)
            for segment in segments
            if time is None or time.state not in segment.after  # else it came later
        ]

    found = {}
    for time in (None, *times):
        what = history(time)
        found[tuple(segment.state for segment in what)] = what
    return list(found.values())
