"""Clothes, shoes and bags, drawn: polygons and strokes whose measures are random, ten kinds.

What a T-shirt, a trouser or a sandal looks like is no secret of anybody's pictures. Whoever drew
these had seen what Fashion-MNIST looks like, as everybody has who trains on it: one thing on black,
28 pixels wide, shoes to the left.
"""

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

SIZE, FINE, MIDDLE = 28, 4, 14.0  # pixels; how many times finer is drawn; the axis of symmetry


class Sheet:
    """A picture in the making; shades go from 0, the ground, to 1, lengths are pixels."""

    def __init__(self):
        self.image = Image.new("L", (SIZE * FINE, SIZE * FINE))
        self._pen = ImageDraw.Draw(self.image)

    def polygon(self, points, shade):
        self._pen.polygon([(x * FINE, y * FINE) for x, y in points], fill=_ink(shade))

    def halves(self, points, shade):
        """A polygon right of the middle, and its mirror image."""
        self.polygon([(MIDDLE + x, y) for x, y in points], shade)
        self.polygon([(MIDDLE - x, y) for x, y in points], shade)

    def oval(self, x, y, width, height, shade):
        box = (x - width, y - height, x + width, y + height)
        self._pen.ellipse([FINE * side for side in box], fill=_ink(shade))

    def stroke(self, points, width, shade):
        path = [(x * FINE, y * FINE) for x, y in points]
        self._pen.line(path, fill=_ink(shade), width=max(1, int(width * FINE)), joint="curve")


def _ink(shade):
    return int(255 * min(max(shade, 0), 1))


def _torso(sheet, g, shade, sleeves):
    """What covers the chest, with "no", "short" or "long" sleeves: top, hem and half the neck."""
    u = g.uniform
    top, hem, neck = u(0.5, 3.5), u(24, 27.8), u(1.5, 3.5)
    shoulder, waist, hips = u(4.5, 7.5), u(4.5, 7.5), u(5, 8)
    outline = [(neck, top), (shoulder, top + u(0.5, 2)), (waist, u(11, 16)), (hips, hem)]
    sheet.halves([(0, top + 0.5), *outline, (0, hem)], shade)
    if sleeves == "short":
        end, out, wide = u(7, 12), u(9, 13.5), u(3, 5)
        cuff = [(out, end - wide / 2), (out - u(0.5, 2.5), end + wide / 2)]
        pit = (waist - 0.3, min(end + 2, 12))
        sleeve = [(shoulder - 1, top + 0.5), (shoulder + 1, top + 1), *cuff, pit]
        sheet.halves(sleeve, shade * u(0.85, 1.1))
    elif sleeves == "long":
        end, out, wide = u(20, 27.5), u(8.5, 13), u(1.3, 2.5)
        cuff = [(out + u(-1, 0.8), end), (out - 2 * wide, end + u(-0.5, 0.5))]
        pit, elbow = (waist + u(-0.5, 0.8), u(9, 12)), (out - 0.5, u(9, 13))
        sleeve = [(shoulder - 1, top + 0.5), (shoulder + 1, top + 1.2), elbow, *cuff, pit]
        sheet.halves(sleeve, shade * u(0.8, 1.15))
        if g.random() < 0.6:  # a shadow between sleeve and body
            for side in (-1, 1):
                seam = [(waist + 0.3, 10), (hips + u(-0.3, 0.6), hem)]
                path = [(MIDDLE + side * x, y) for x, y in seam]
                sheet.stroke(path, 0.35, shade * u(0, 0.7))
    return top, hem, neck


def _print(sheet, g, wide, low):
    """A patch on the chest."""
    u = g.uniform
    left, right, below = u(1, wide), u(1, wide), u(12, low)
    corners = [(-left, 9), (right, 9), (right, below), (-left, below)]
    sheet.polygon([(MIDDLE + x, y) for x, y in corners], u())


def _collar(sheet, g, top, neck, depth, shade):
    sheet.polygon([(MIDDLE - neck, top), (MIDDLE + neck, top), (MIDDLE, top + depth)], shade)


def t_shirt(sheet, g, shade):
    u = g.uniform
    top, _, neck = _torso(sheet, g, shade, "short" if g.random() < 0.85 else "no")
    sheet.oval(MIDDLE, top, neck, u(0.7, 2.5), 0 if g.random() < 0.6 else shade / 2)
    if g.random() < 0.35:
        _print(sheet, g, 4, 19)


def trouser(sheet, g, shade):
    u = g.uniform
    top, hem, crotch, gap = u(0.3, 2), u(26, 27.8), u(7, 13), u(0, 0.6)
    waist, thigh, ankle = u(3, 5.5), u(3.5, 6.5), u(3, 7.5)
    outside = [(0, top), (waist, top), (thigh, crotch - 2), (ankle, hem)]
    sheet.halves([*outside, (ankle - u(1.8, 3.5), hem), (gap, crotch), (0, crotch)], shade)
    if g.random() < 0.5:
        sheet.stroke([(MIDDLE, top), (MIDDLE, crotch)], 0.3, 0.6 * shade)


def pullover(sheet, g, shade):
    u = g.uniform
    top, _, neck = _torso(sheet, g, shade, "long")
    ribbed = 0 if g.random() < 0.4 else shade * u(0.4, 1.1)
    sheet.oval(MIDDLE, top, neck, u(0.5, 1.8), ribbed)
    if g.random() < 0.3:
        _print(sheet, g, 4, 17)


def dress(sheet, g, shade):
    u = g.uniform
    top, waistline, hem = u(0.3, 2), u(8, 14), u(26, 27.8)
    shoulder, waist, skirt = u(2, 4.5), u(2, 4.5), u(2.5, 8.5)
    neckline = [(0, top + u(0.5, 3)), (u(1, 2), top), (shoulder, top + 0.4)]
    side = [(shoulder - u(0, 0.8), 5), (waist, waistline), (skirt, hem)]
    sheet.halves([*neckline, *side, (0, hem)], shade)
    sleeves = g.choice(["no", "no", "short", "long"])
    if sleeves == "short":
        out = (shoulder + u(1, 4), u(4, 7))
        sheet.halves([(shoulder - 0.8, top + 0.4), out, (shoulder + 0.3, 8)], shade)
    elif sleeves == "long":
        elbow, cuff = (shoulder + u(1.5, 4), u(9, 12)), (shoulder + u(2, 4), u(16, 20))
        inside = [(shoulder + 0.5, u(15, 19)), (shoulder, 8)]
        sheet.halves([(shoulder - 0.8, top + 0.4), elbow, cuff, *inside], shade)
    if g.random() < 0.4:
        belt = [(MIDDLE - waist, waistline), (MIDDLE + waist, waistline)]
        sheet.stroke(belt, 0.6, shade * u(0.2, 0.8))


def coat(sheet, g, shade):
    u = g.uniform
    top, hem, neck = _torso(sheet, g, shade, "long")
    _collar(sheet, g, top, neck, u(3, 10), shade * u())
    front = [(MIDDLE + u(-0.5, 0.5), top + 3), (MIDDLE + u(-1, 1), hem)]
    sheet.stroke(front, u(0.3, 1.2), shade * u(0, 0.6))
    if g.random() < 0.5:
        sheet.halves([(2, u(15, 18)), (5, 17), (5, 18), (2, 18)], shade * u(0.3, 0.8))


def sandal(sheet, g, shade):
    u = g.uniform
    ball, toe, back, thick = u(17, 24), u(0.3, 2.5), u(25.5, 27.8), u(0.8, 2.5)
    heel = g.choice([0, u(0, 3), u(3, 10)])
    upper = [(toe, ball), (toe + 8, ball + 0.3), (toe + 14, ball - heel / 2), (back, ball - heel)]
    sheet.polygon(upper + [(x, y + thick) for x, y in reversed(upper)], shade)
    if heel > 2:
        post = [(back - u(1.5, 4), ball - heel), (back, ball - heel)]
        sheet.polygon([*post, (back - 0.5, ball + thick), (back - 1.8, ball + thick)], shade)
    elif g.random() < 0.4:
        low = ball + thick
        wedge = [(toe + 4, low - 0.4), (back, ball - heel), (back, low + 1), (toe + 2, low + 0.5)]
        sheet.polygon(wedge, shade * u(0.5, 1))
    for _ in range(g.integers(1, 4)):
        x = toe + u(2, 10)
        strap = [(x, ball), (x + u(1, 4), ball - u(3, 7)), (x + u(4, 9), ball - 0.4 * heel)]
        sheet.stroke(strap, u(0.6, 2.2), shade * u(0.7, 1))
    if g.random() < 0.7:
        high = ball - heel - u(4, 9)
        strap = [(back - u(0.5, 2), high), (back - u(5, 12), high + u(-1, 3))]
        sheet.stroke([(back - 0.8, ball - heel), *strap], u(0.6, 1.8), shade * u(0.7, 1))


def shirt(sheet, g, shade):
    u = g.uniform
    top, hem, neck = _torso(sheet, g, shade, g.choice(["no", "short", "long", "long"]))
    _collar(sheet, g, top, neck, u(1.5, 5), shade * u())
    if g.random() < 0.7:
        placket = [(MIDDLE, top + 2), (MIDDLE + u(-0.5, 0.5), hem)]
        sheet.stroke(placket, 0.35, shade * u(0.3, 0.8))
        for y in np.arange(top + 4, hem, u(2.5, 4)):
            sheet.oval(MIDDLE + 0.3, y, 0.35, 0.35, shade * u(0, 0.5))


def _sole(sheet, g, toe, back, ball, shade, heel=0):
    thick = g.uniform(0.8, 2.2)
    upper = [(toe, ball), (toe + 3, ball + 0.3), (back, ball - heel)]
    lower = [(back, ball + thick), (back - 4, ball + thick), (toe + 1, ball + thick)]
    sheet.polygon(upper + lower, shade)


def sneaker(sheet, g, shade):
    u = g.uniform
    ball, toe, back, high = u(16, 19.5), u(0.3, 2), u(26, 27.8), u(5.5, 9)
    top = ball - high
    front = [(toe, ball), (toe + 0.8, ball - u(1.5, 3)), (toe + 7, ball - u(3, 4.5))]
    opening = [(toe + u(12, 15), top), (toe + u(15, 17), top + 0.3), (toe + 18, top + u(1, 2))]
    collar = [(back - 2, top + u(-0.5, 1)), (back - 0.4, top + 0.5), (back, ball)]
    sheet.polygon(front + opening + collar, shade)
    _sole(sheet, g, toe, back, ball, g.choice([1, 0.9, 0.6 * shade, shade]))
    for lace in range(g.integers(0, 5)):
        start = (toe + 8 + 1.5 * lace, ball - 4 - 0.9 * lace)
        sheet.stroke([start, (toe + 10 + 1.4 * lace, ball - 2.5 - lace)], 0.5, u())
    if g.random() < 0.5:
        sheet.stroke([(toe + u(8, 14), ball), (back - u(3, 9), top + 2)], u(0.5, 1.5), u())


def bag(sheet, g, shade):
    u = g.uniform
    top, bottom, above, below = u(5, 13), u(22, 27), u(8, 13.5), u(8, 13.5)
    handle = g.choice(["arc", "arc", "strap", "no"])
    if handle == "arc":
        high = u(3, 9)
        arc = [(0.4 * above, top - 0.8 * high), (u(0.3, 0.8) * above, top)]
        left = [(MIDDLE - x, y) for x, y in reversed(arc)]
        path = [*left, (MIDDLE, top - high), *((MIDDLE + x, y) for x, y in arc)]
        sheet.stroke(path, u(0.5, 1.5), shade * u(0.6, 1.1))
    elif handle == "strap":
        left, right = (MIDDLE - u(0.2, 0.9) * above, 1), (MIDDLE + u(0.2, 0.9) * above, 1)
        path = [(MIDDLE - above, top + 1), left, right, (MIDDLE + above, top + 1)]
        sheet.stroke(path, u(0.4, 1.2), shade * u(0.6, 1))
    body = [(above, top + u(0, 1)), (below, bottom - 1), (below - 1, bottom)]
    sheet.halves([(0, top), *body, (0, bottom)], shade)
    if g.random() < 0.6:
        flap = [(0, top), (above - 0.5, top), (above - 1, top + u(3, 9)), (0, top + u(4, 10))]
        sheet.halves(flap, shade * u(0.5, 1))
    if g.random() < 0.5:
        sheet.oval(MIDDLE, u(top + 2, bottom - 4), u(0.5, 2), u(0.5, 1.5), u())


def ankle_boot(sheet, g, shade):
    u = g.uniform
    ball, toe, back, shaft, ankle = u(22, 25), u(0.3, 4), u(22, 27), u(2, 9), u(9, 14)
    heel = u(0, 3.5) if g.random() < 0.5 else 0
    instep = [(toe + 1, ball - u(2, 3.5)), (toe + ankle - 3, ball - u(4.5, 7))]
    front = [(toe, ball), *instep, (toe + ankle, ball - 9), (toe + ankle + u(-1.5, 1), shaft)]
    behind = [(back - u(-0.5, 1.5), shaft + u(-1, 1)), (back - u(0, 1.5), ball - 6)]
    sheet.polygon([*front, *behind, (back, ball - heel)], shade)
    _sole(sheet, g, toe, back, ball, shade * u(0.5, 1), heel)
    if heel:
        block = [(back - 3, ball - heel), (back, ball - heel)]
        sheet.polygon([*block, (back - 0.5, ball + 2.5), (back - 2.3, ball + 2.5)], shade)
    if g.random() < 0.4:
        sheet.stroke([(back - 3, shaft), (back - 4, ball - 2)], 0.4, 0.4 * shade)


#: In the order of Fashion-MNIST's labels.
KINDS = [
    t_shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle_boot,
]  # fmt: skip


def clothes(count, seed=0):
    """Pictures of random kinds, values from 0 to 1, and their kinds.

    Each is stretched, sheared and shifted a little; some have stripes, a grain, or light from one
    side.
    """
    g = np.random.default_rng(seed)
    kinds = g.integers(0, len(KINDS), count)
    pictures = np.zeros((count, SIZE, SIZE, 1), np.float32)
    y, x = np.mgrid[:SIZE, :SIZE]
    for picture, kind in zip(pictures[..., 0], kinds, strict=True):
        sheet = Sheet()
        KINDS[kind](sheet, g, g.uniform(0.25, 1))
        right, down = FINE * g.normal(0, 0.5, 2)
        stretch, shear = 1 + g.normal(0, 0.03, 2), g.normal(0, (0.03, 0.02))
        matrix = (stretch[0], shear[0], right, shear[1], stretch[1], down)
        moved = sheet.image.transform(
            sheet.image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        )
        thing = np.asarray(moved.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32) / 255
        if g.random() < 0.4:
            angle = g.choice([0, 0, np.pi / 2, np.pi / 2, g.uniform(0, np.pi)])
            wave = g.uniform(0.4, 2.8) * (np.cos(angle) * x + np.sin(angle) * y)
            thing = thing * (1 + g.uniform(0, 0.5) * np.sin(wave + g.uniform(0, 6)))
        if g.random() < 0.6:
            width = g.uniform(0.4, 1.8)
            grain = ndimage.gaussian_filter(g.standard_normal(thing.shape), width)
            thing = thing * (1 + g.uniform(0, 0.7) * (1 + width) * grain)
        if g.random() < 0.5:
            across, along = g.normal(0, (0.015, 0.012))
            thing = thing * (1 + across * (x - MIDDLE) + along * (y - MIDDLE))
        picture[:] = np.clip(thing, 0, 1)
    return pictures, np.int32(kinds)


def gallery(columns=12):
    """A row of pictures for each kind, as one array of bytes."""
    pictures, kinds = clothes(40 * len(KINDS))
    rows = [np.hstack(pictures[kinds == kind][:columns, ..., 0]) for kind in range(len(KINDS))]
    return np.uint8(255 * np.vstack(rows))
