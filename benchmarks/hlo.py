"""What a program in the text of XLA's HLO multiplies, and how many bytes its operations name.

Neither is a time. Multiplications are those of matrix products and convolutions, by the shapes in
the text; products with padding count. The bytes are those of the operands and results of every
operation, before XLA fuses any; a loop, as which large draws of noise are written, counts as one.
"""

import math
import re
from typing import NamedTuple

#: %name = shape operation(operands), attributes
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<result>.+?) (?P<operation>[\w-]+)\((?P<rest>.*)"
)
_COMPUTATION = re.compile(r"(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.-]+))"
)

#: Bytes of a number.
_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
           "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip

#: What moves nothing, or stands for others.
_FREE = {"bitcast", "call", "conditional", "constant", "get-tuple-element", "parameter", "reshape",
         "tuple"}  # fmt: skip


class Cost(NamedTuple):
    """Of a program.

    Attributes:
        flops: two for each multiplication in a product of matrices or a convolution.
        bytes: of operands and results.
    """

    flops: int
    bytes: int

    def __add__(self, other):
        return Cost(*map(sum, zip(self, other, strict=True)))


def cost(text):
    """The `Cost` of a program; of a conditional, that of its dearest branch.

    Raises:
        ValueError: it multiplies in a loop, of which the text does not tell how often it is run.
    """
    bodies, entry = {}, None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            lines = bodies[found["name"]] = []
            entry = found["name"] if line.startswith("ENTRY") else entry
        elif line.startswith(" "):
            lines.append(line)
    return _of_computation(entry, bodies)


def _of_computation(name, bodies):
    """The sum over what the result depends on; the text has other operations, too."""
    found = {each["name"]: each for each in map(_INSTRUCTION.match, bodies[name]) if each}
    needed, open_ends = set(), [name for name, each in found.items() if each["root"]]
    while open_ends:
        if (name := open_ends.pop()) not in needed:
            needed.add(name)
            open_ends += re.findall(r"%([\w.-]+)", _split(found[name]["rest"])[0])
    return sum((_of_instruction(found[name], bodies) for name in needed), Cost(0, 0))


def _of_instruction(found, bodies):
    operation, (operands, attributes) = found["operation"], _split(found["rest"])
    if operation == "while" and _of_computation(_called("body", attributes), bodies).flops:
        raise ValueError("It multiplies in a loop: how often that is run is not in its text.")
    if operation == "call":
        return _of_computation(_called("to_apply", attributes), bodies)
    if operation == "conditional":
        names = re.findall(r"[\w.-]+", " ".join(a or b for a, b in _BRANCHES.findall(attributes)))
        return max(_of_computation(branch, bodies) for branch in names)
    if operation in _FREE:
        return Cost(0, 0)
    results, arguments = _shapes(found["result"]), _shapes(operands)
    moved = sum(_WIDTHS.get(kind, 4) * math.prod(sizes) for kind, sizes in results + arguments)
    return Cost(_flops(operation, results, arguments, attributes), moved)


def _called(name, attributes):
    return re.search(rf"{name}=%?([\w.-]+)", attributes)[1]


def _flops(operation, results, arguments, attributes):
    numbers = math.prod(results[0][1]) if results else 0
    if operation == "dot":
        (_, left), _ = arguments
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", attributes)[1]
        return 2 * numbers * math.prod(left[int(axis)] for axis in axes.split(",") if axis)
    if operation == "convolution":
        _, (_, kernel) = arguments
        letters = re.search(r"dim_labels=\w+_(\w+)->", attributes)[1]
        return 2 * numbers * math.prod(kernel) // kernel[letters.index("o")]
    if operation == "custom-call" and re.search("matmul|conv|dot|gemm", attributes, re.IGNORECASE):
        raise ValueError("The program multiplies in a custom call, whose shapes are not read here.")
    return 0


def _split(rest):
    """(the operands, the attributes) of what follows the opening bracket of an operation."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def _shapes(text):
    """[(type, sizes)] of the arrays that a text names."""
    return [
        (kind, tuple(int(size) for size in sizes.split(",") if size))
        for kind, sizes in _SHAPE.findall(text)
        if kind in _WIDTHS
    ]
