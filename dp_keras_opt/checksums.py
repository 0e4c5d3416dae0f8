"""Whether weights are still those that private steps left: one checksum for each variable.

It is computed where the variable lies: the sum modulo 2⁶⁴ of what SplitMix64 makes of the bits of
each element at its place. That is one to one, so a change of one element always shows; and no
pattern makes changes of many cancel. It is against mistakes, not against malice.
"""

import contextlib
import weakref

import tensorflow as tf

#: What stands for the sum of a variable that was found changed, until weights are loaded anew.
CHANGED = "changed"

_BLOCK = 2**18  # elements at once: what is computed of them stays in the caches
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}

_sums: dict[int, int | str] = {}  # id of a variable -> its sum, or CHANGED
_last_registration = 0


def sums_of(variables):
    """The checksum of each variable now, as a list of integers."""
    return [int(_sum(_bits(variable))) for variable in variables]


def register(variables):
    """Takes the values of now as those that are accounted for."""
    for variable, value in zip(variables, sums_of(variables), strict=True):
        if _sums.get(id(variable)) != CHANGED:
            _set(variable, value)


def forget(variables):
    """Lets the variables be moved: their values are not known until they are registered again."""
    for variable in variables:
        if _sums.get(id(variable)) != CHANGED:
            _sums.pop(id(variable), None)


def are_changed(variables):
    """Whether any of the variables was moved since it was registered; this is remembered."""
    known = [variable for variable in variables if _is_known(variable)]
    for variable, value in zip(known, sums_of(known), strict=True):
        if _sums[id(variable)] != value:
            _sums[id(variable)] = CHANGED
    return any(_sums.get(id(variable)) == CHANGED for variable in variables)


def mark(variables):
    """Has the variables count as changed, those too of which no sum was known."""
    for variable in variables:
        _set(variable, CHANGED)


@contextlib.contextmanager
def taken_back(variables):
    """Registers the variables anew after what is done to them within, and taken back."""
    are_changed(variables)
    known = [variable for variable in variables if _is_known(variable)]
    try:
        yield
    finally:
        register(known)


@contextlib.contextmanager
def still_changed(variables):
    """Has those count as changed that did before, unless they get another value within."""
    are_changed(variables)
    changed = [variable for variable in variables if _sums.get(id(variable)) == CHANGED]
    before = sums_of(changed)
    try:
        yield
    finally:
        after = zip(changed, before, sums_of(changed), strict=True)
        mark([variable for variable, old, new in after if new == old])


@contextlib.contextmanager
def noticed(variables):
    """Has those variables count as changed that have another value after what is done within."""
    before = sums_of(variables)
    try:
        yield
    finally:
        after = zip(variables, before, sums_of(variables), strict=True)
        mark([variable for variable, old, new in after if new != old])


def to_config(variables, rewritten=()):
    """The checksums as JSON-able values: those of now, and which variables were changed.

    Args:
        variables: whose.
        rewritten: those of them that are not saved as they are. None stands for their sums.
    """
    are_changed(variables)
    rewritten = {id(variable) for variable in rewritten}

    def entry(variable, value):
        if _sums.get(id(variable)) == CHANGED:
            return CHANGED
        return None if id(variable) in rewritten else [_dtype(variable), value]

    return list(map(entry, variables, sums_of(variables)))


def from_config(variables, config):
    """Takes what `to_config` wrote of variables whose values are loaded into these."""
    for variable in variables:
        _sums.pop(id(variable), None)
    if len(config) != len(variables):  # of other variables, as where LoRA is merged when saved
        if CHANGED in config:  # any of them may be it
            mark(variables)
        return
    for variable, entry in zip(variables, config, strict=True):
        if entry == CHANGED:
            _set(variable, CHANGED)
        elif entry is not None and entry[0] == _dtype(variable):
            _set(variable, entry[1])


def _is_known(variable):
    return _sums.get(id(variable), CHANGED) != CHANGED


def last_registration():
    """A number that changes whenever sums become known."""
    return _last_registration


def _set(variable, value):
    global _last_registration
    _last_registration += 1
    if id(variable) not in _sums:
        weakref.finalize(variable, _sums.pop, id(variable), None).atexit = False
    _sums[id(variable)] = value


def _dtype(variable):
    return tf.as_dtype(variable.dtype).name


def _bits(variable):
    """The elements of a variable, in a row, as integers of the same size."""
    flat = tf.reshape(tf.convert_to_tensor(variable), [-1])
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.int8)
    if flat.dtype.is_complex:
        flat = tf.concat([tf.math.real(flat), tf.math.imag(flat)], 0)
    return tf.bitcast(flat, _INTEGERS[flat.dtype.size])


def _mixed(bits):
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), on signed integers."""
    bits = _folded(bits, 30) * -0x40A7B892E31B1A47
    bits = _folded(bits, 27) * -0x6B2FB644ECCEEE15
    return _folded(bits, 31)


def _folded(bits, shift):
    """x ^ (x >> shift), where what is shifted in is 0."""
    shifted = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, shift), 2 ** (64 - shift) - 1)
    return tf.bitwise.bitwise_xor(bits, shifted)


@tf.function(reduce_retracing=True, autograph=False)
def _sum(bits):
    size = tf.size(bits, tf.int64)

    def add(start, total):
        block = tf.cast(bits[start : start + _BLOCK], tf.int64)
        places = tf.range(start + 1, start + 1 + tf.size(block, tf.int64))
        return start + _BLOCK, total + tf.reduce_sum(_mixed(block - 0x61C8864680B583EB * places))

    zero = tf.constant(0, tf.int64)
    return tf.while_loop(lambda start, _: start < size, add, (zero, zero))[1]
