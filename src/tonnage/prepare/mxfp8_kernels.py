"""Compiled loops of MXFP8 conversion: addresses in, bytes out, one block of 32 elements at a time.

``prepare/mxfp8.py`` checks shapes, shares rows among threads and turns tallies into figures; nothing else calls this.
A block is worked on as vectors of 32 lanes, written as LLVM instructions because numba widens every integer to 64 bits
and the lanes are lost: BF16 blocks as 32 x i16 (twice the lanes of a float, and scaling is a subtraction of exponents),
everything else as 32 x float. Addresses rather than arrays: one compilation serves strided, read-only and mapped
memory.

Everything of a loop stays in this file: numba's cache notices changes of the file that holds the function only.

Source:
    OCP Microscaling Formats v1.0, sections 5.3.1 (E4M3), 5.4.1 (E8M0) and 6.3 (conversion). Compiled by
    ``numba.extending.intrinsic`` (numba 0.61 and later) with the builder of ``llvmlite.ir``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

LANES = 32
I8, I16, I32, I64, I128 = (ir.IntType(bits) for bits in (8, 16, 32, 64, 128))
F32, F64 = ir.FloatType(), ir.DoubleType()

INFINITE = 0x7F800000  # this and the next two are float32 bits
LARGEST = 0x43E00000  # 448, the largest E4M3 value
NORMAL = 0x3C800000  # 2**-6, the smallest value with an E4M3 exponent
NAN_CODE, NAN_SCALE = 0x7F, 255
WORDS_FROM = 12  # lowest scale byte of the 16-bit way: below half a step of E4M3 lies what is subnormal in BF16

# numba compiles a loop per type of argument: these stand for the dtypes.
BF16, F16 = types.uint16, types.int16

# Slots of a tally, int64 each. Sums of squares are kept per scale byte, 128 bits each; see ``_add_errors``.
ZERO, SATURATED, NONFINITE, FIRST, TOP = range(5)
SQUARES = 8
ERRORS = SQUARES + 512
PEAKS = ERRORS + 512
SLOTS = PEAKS + LANES // 2
SUM_BITS = 36  # of a sum of squares after the binary point: sums reach 2**23, so 60 bits are used

Function = TypeVar("Function", bound=Callable[..., Any])


class Rows(NamedTuple):
    """Where rows of whole blocks are: addresses and strides in bytes, counts of rows and of their blocks."""

    values: int
    codes: int
    scales: int
    values_stride: int
    codes_stride: int
    scales_stride: int
    rows: int
    blocks: int
    element_bytes: int


class Rule(NamedTuple):
    """A scale rule: the scale byte is the exponent field of (float32 bits of the block's maximum + ``add``), less 8.

    Attributes:
        add: Carries into the exponent for the mantissas that the rule moves up.
        infinite: Scale byte of a block with an infinity and no NaN; 255 treats it as one with a NaN.
    """

    add: int
    infinite: int


def _compiled(function: Function) -> Function:
    """Compile on first call, from then on from numba's cache; without the interpreter's lock."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast("Function", numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no directory to cache in may be written: every process compiles, in about a second
        return cast("Function", numba.njit(**options)(function))


def _lowered(function: Callable[..., Any]) -> Any:
    """Let compiled functions call what ``function`` builds; it returns a signature and the builder of its LLVM code."""
    return intrinsic(function)


class _Lanes:
    """Builder of vectors of 32 lanes: constants and scalars are spread over the lanes."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def splat(self, kind: Any, value: float) -> Any:
        """Return a constant in every lane."""
        return ir.Constant(ir.VectorType(kind, LANES), [ir.Constant(kind, value)] * LANES)

    def spread(self, scalar: Any) -> Any:
        """Return a scalar in every lane."""
        vector = ir.VectorType(scalar.type, LANES)
        one = self.b.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, LANES), [I32(0)] * LANES))

    def cast(self, how: str, vector: Any, kind: Any) -> Any:
        """Return a cast of every lane: ``zext``, ``trunc``, ``fpext``, ``bitcast``."""
        return getattr(self.b, how)(vector, ir.VectorType(kind, LANES))

    def load(self, kind: Any, address: Any) -> Any:
        """Return 32 lanes of memory."""
        vector = ir.VectorType(kind, LANES)
        return self.b.load(self.b.inttoptr(address, vector.as_pointer()), align=1)

    def store(self, vector: Any, address: Any) -> None:
        """Write 32 lanes to memory."""
        self.b.store(vector, self.b.inttoptr(address, vector.type.as_pointer()), align=1)

    def smaller(self, a: Any, b: Any) -> Any:
        """Return the smaller of unsigned lanes."""
        return self.b.select(self.b.icmp_unsigned("<", a, b), a, b)

    def rounded(self, kind: Any, value: Any, bits: int) -> Any:
        """Return ``value / 2**bits`` to nearest, ties to even."""
        odd = self.b.and_(self.b.lshr(value, self.splat(kind, bits)), self.splat(kind, 1))
        near = self.b.add(self.b.add(value, self.splat(kind, (1 << (bits - 1)) - 1)), odd)
        return self.b.lshr(near, self.splat(kind, bits))

    def floats(self, kind: Any, address: Any) -> Any:
        """Return 32 source elements as float32, exactly; ``kind`` is numba's type of the dtype's stand-in."""
        if kind == BF16:
            wide = self.cast("zext", self.load(I16, address), I32)
            return self.cast("bitcast", self.b.shl(wide, self.splat(I32, 16)), F32)
        if kind == F16:
            return self.half(self.cast("zext", self.load(I16, address), I32))
        return self.load(F32, address)

    def half(self, bits: Any) -> Any:
        """Return F16 bits, widened to i32, as float32: LLVM's own cast is missing on processors without F16C."""
        magnitude = self.b.and_(bits, self.splat(I32, 0x7FFF))
        finite = self.b.icmp_unsigned("<", magnitude, self.splat(I32, 0x7C00))
        raised = self.b.select(finite, self.splat(I32, (127 - 15) << 23), self.splat(I32, (255 - 31) << 23))
        normal = self.b.add(self.b.shl(magnitude, self.splat(I32, 13)), raised)
        subnormal = self.b.fmul(self.cast("sitofp", magnitude, F32), self.splat(F32, 2.0**-24))
        small = self.b.icmp_unsigned("<", magnitude, self.splat(I32, 1 << 10))
        value = self.b.select(small, self.cast("bitcast", subnormal, I32), normal)
        sign = self.b.shl(self.b.and_(bits, self.splat(I32, 0x8000)), self.splat(I32, 16))
        return self.cast("bitcast", self.b.or_(value, sign), F32)

    def power(self, exponent: Any) -> Any:
        """Return ``2**exponent`` as a float32 scalar for an i64 from -127 to 127."""
        field = self.b.trunc(self.b.add(exponent, I64(127)), I32)
        bits = self.b.select(self.b.icmp_signed(">", field, I32(0)), self.b.shl(field, I32(23)), I32(0x00400000))
        return self.b.bitcast(bits, F32)

    def decoded(self, codes: Any) -> Any:
        """Return the magnitudes of 32 E4M3 codes, widened to i32, as float32; NaN codes are left out.

        Subnormal codes take the next exponent and lose its leading one, so no lane is ever subnormal in float32.
        """
        low = self.b.and_(codes, self.splat(I32, 0x7F))
        small = self.b.icmp_unsigned("<", low, self.splat(I32, 8))
        bits = self.b.add(self.b.shl(low, self.splat(I32, 20)), self.splat(I32, 120 << 23))
        normal = self.cast("bitcast", bits, F32)
        raised = self.cast("bitcast", self.b.add(bits, self.splat(I32, 1 << 23)), F32)
        subnormal = self.b.fsub(raised, self.splat(F32, 2.0**-6))
        return self.b.select(small, subnormal, normal)

    def total(self, vector: Any) -> Any:
        """Return the float32 sum of the lanes, halves added to halves: the same on every processor."""
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            places = [[I32(begin + lane) for lane in range(lanes)] for begin in (0, lanes)]
            masks = [ir.Constant(ir.VectorType(I32, lanes), half) for half in places]
            vector = self.b.fadd(*(self.b.shuffle_vector(vector, vector, mask) for mask in masks))
        return self.b.extract_element(vector, I32(0))


def _largest_lane(builder: Any, vector: Any) -> Any:
    """Return the largest unsigned lane."""
    kind = vector.type.element
    name = f"llvm.vector.reduce.umax.v{LANES}i{kind.width}"
    known = builder.module.globals.get(name)
    function = known or ir.Function(builder.module, ir.FunctionType(kind, [vector.type]), name)
    return builder.call(function, [vector])


@_lowered
def _largest(_context: Any, kind: Any, address: Any) -> Any:
    """Return the largest magnitude of a block as float32 bits; a non-finite element makes it ``INFINITE`` or more."""

    def build(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _Lanes(builder)
        if signature.args[0] == BF16:
            words = builder.and_(lanes.load(I16, arguments[1]), lanes.splat(I16, 0x7FFF))
            return builder.shl(builder.zext(_largest_lane(builder, words), I64), I64(16))
        bits = lanes.cast("bitcast", lanes.floats(signature.args[0], arguments[1]), I32)
        return builder.zext(_largest_lane(builder, builder.and_(bits, lanes.splat(I32, 0x7FFFFFFF))), I64)

    return types.int64(kind, address), build


@_lowered
def _encode_words(_context: Any, address: Any, target: Any, scale: Any) -> Any:
    """Write the codes of a finite BF16 block, working on its bits; ``scale`` is at least ``WORDS_FROM``.

    Above 2**-6 of the scale, the code is the element's bits with another exponent bias, rounded from 7 to 3 bits of
    mantissa. Below, it is the mantissa with its leading one, shifted right by what the exponent lacks.
    """

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        lanes, b = _Lanes(builder), builder
        word = lanes.load(I16, arguments[0])
        scale = b.trunc(arguments[2], I16)
        bits = b.and_(word, lanes.splat(I16, 0x7FFF))
        lowest = b.sub(scale, I16(6))  # exponent field that becomes 1

        rebiased = b.sub(b.shl(bits, lanes.splat(I16, 4)), lanes.spread(b.shl(b.sub(scale, I16(7)), I16(11))))
        lacking = b.sub(lanes.spread(lowest), b.lshr(bits, lanes.splat(I16, 7)))
        mantissa = b.or_(b.and_(bits, lanes.splat(I16, 0x7F)), lanes.splat(I16, 0x80))
        shifted = b.lshr(b.shl(mantissa, lanes.splat(I16, 4)), lanes.smaller(lacking, lanes.splat(I16, 15)))
        normal = b.icmp_unsigned(">=", bits, lanes.spread(b.shl(lowest, I16(7))))

        near = lanes.smaller(b.select(normal, rebiased, shifted), lanes.splat(I16, 0x7E << 8))
        code = lanes.rounded(I16, near, 8)
        sign = b.and_(b.lshr(word, lanes.splat(I16, 8)), lanes.splat(I16, 0x80))
        lanes.store(lanes.cast("trunc", b.or_(code, sign), I8), arguments[1])
        return arguments[2]

    return types.int64(address, target, scale), build


@_lowered
def _encode_floats(_context: Any, kind: Any, address: Any, target: Any, scale: Any) -> Any:
    """Write the codes of any block without a NaN, in float32; infinities become 448."""

    def build(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, b = _Lanes(builder), builder
        value = lanes.floats(signature.args[0], arguments[1])
        bits = lanes.cast("bitcast", value, I32)
        magnitude = lanes.cast("bitcast", b.and_(bits, lanes.splat(I32, 0x7FFFFFFF)), F32)
        factor = lanes.spread(lanes.power(b.sub(I64(127), arguments[3])))
        scaled = lanes.smaller(lanes.cast("bitcast", b.fmul(magnitude, factor), I32), lanes.splat(I32, LARGEST))
        normal = b.sub(lanes.rounded(I32, scaled, 20), lanes.splat(I32, 120 << 3))
        # Adding 2**14 rounds to multiples of 2**-9, the step of subnormal codes: its sum's low bits are the code.
        step = b.fadd(lanes.cast("bitcast", scaled, F32), lanes.splat(F32, 2.0**14))
        subnormal = b.sub(lanes.cast("bitcast", step, I32), lanes.splat(I32, (14 + 127) << 23))
        small = b.icmp_unsigned("<", scaled, lanes.splat(I32, NORMAL))
        sign = b.and_(b.lshr(bits, lanes.splat(I32, 24)), lanes.splat(I32, 0x80))
        lanes.store(lanes.cast("trunc", b.or_(b.select(small, subnormal, normal), sign), I8), arguments[2])
        return arguments[3]

    return types.int64(kind, address, target, scale), build


@_lowered
def _add_errors(_context: Any, kind: Any, address: Any, codes: Any, scale: Any, tally: Any) -> Any:
    """Add a finite block's squares, squared errors and largest errors to a tally.

    Magnitudes are divided by the scale, so their squares sum to at most 2**23, in float32 and always in the same
    order. The sum is cut to a multiple of 2**-36 and added, as an integer, to the total of its scale byte: whatever the
    order in which blocks come, the totals are the same.
    """

    def build(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, b = _Lanes(builder), builder
        _, address, codes, scale, tally = arguments
        bits = b.and_(
            lanes.cast("bitcast", lanes.floats(signature.args[0], address), I32), lanes.splat(I32, 0x7FFFFFFF)
        )
        factor = lanes.spread(lanes.power(b.sub(I64(127), scale)))
        scaled = b.fmul(lanes.cast("bitcast", bits, F32), factor)
        error = b.fsub(scaled, lanes.decoded(lanes.cast("zext", lanes.load(I8, codes), I32)))
        for slot, lane in ((SQUARES, scaled), (ERRORS, error)):
            total = b.fmul(b.fpext(lanes.total(b.fmul(lane, lane)), F64), F64(2.0**SUM_BITS))
            offset = b.add(I64(slot * 8), b.shl(scale, I64(4)))
            pointer = b.inttoptr(b.add(tally, offset), I128.as_pointer())
            sum_so_far = b.load(pointer, align=8)
            b.store(b.add(sum_so_far, b.zext(b.fptosi(total, I64), I128)), pointer, align=8)
        size = b.and_(lanes.cast("bitcast", error, I32), lanes.splat(I32, 0x7FFFFFFF))
        error = b.fmul(lanes.cast("bitcast", size, F32), lanes.spread(lanes.power(b.sub(scale, I64(127)))))
        # As integers, which order like the floats they are: a maximum of floats becomes a masked store, and stalls.
        peaks, bits = b.add(tally, I64(PEAKS * 8)), lanes.cast("bitcast", error, I32)
        before = lanes.load(I32, peaks)
        lanes.store(b.select(b.icmp_unsigned(">", bits, before), bits, before), peaks)
        return tally

    return types.int64(kind, address, codes, scale, tally), build


@_lowered
def _decode(_context: Any, kind: Any, address: Any, codes: Any, scale: Any) -> Any:
    """Write the values of a block of codes as float32 or, rounded to nearest even, as BF16 bits."""

    def build(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, b = _Lanes(builder), builder
        _, address, codes, scale = arguments
        wide = lanes.cast("zext", lanes.load(I8, codes), I32)
        value = b.fmul(lanes.decoded(wide), lanes.spread(lanes.power(b.sub(scale, I64(127)))))
        unknown = b.icmp_unsigned("==", b.and_(wide, lanes.splat(I32, NAN_CODE)), lanes.splat(I32, NAN_CODE))
        unknown = b.or_(unknown, lanes.spread(b.icmp_unsigned("==", scale, I64(NAN_SCALE))))
        magnitude = b.select(unknown, lanes.splat(I32, 0x7FC00000), lanes.cast("bitcast", value, I32))
        sign = b.shl(b.and_(wide, lanes.splat(I32, 0x80)), lanes.splat(I32, 24))
        bits = b.or_(magnitude, sign)
        if signature.args[0] == BF16:
            bits = lanes.cast("trunc", lanes.rounded(I32, bits, 16), I16)
        lanes.store(bits, address)
        return scale

    return types.int64(kind, address, codes, scale), build


@_lowered
def _get(_context: Any, address: Any) -> Any:
    """Return a byte of memory."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(arguments[0], I8.as_pointer()), align=1), I64)

    return types.int64(address), build


@_lowered
def _put(_context: Any, address: Any, byte: Any) -> Any:
    """Write a byte of memory."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I8.as_pointer())
        builder.store(builder.trunc(arguments[1], I8), pointer, align=1)
        return arguments[1]

    return types.int64(address, byte), build


@_lowered
def _is_bf16(_context: Any, kind: Any) -> Any:
    """Return, known when compiling, whether a dtype's stand-in is that of BF16."""
    return types.boolean(kind), lambda _context, _builder, signature, _: ir.IntType(1)(signature.args[0] == BF16)


@_compiled
def _encode_nonfinite(kind: Any, values: int, codes: int, scale: int) -> None:
    """Write the codes of a block with an infinity or a NaN."""
    if scale == NAN_SCALE:
        for lane in range(LANES):
            _put(codes + lane, NAN_CODE)
    else:
        _encode_floats(kind, values, codes, scale)


@_compiled
def quantize_rows(kind: Any, at: Rows, rule: Rule, figures: bool, tally: Any) -> None:  # noqa: FBT001 - numba has no keywords
    """Write codes and scale bytes of rows, and count into a tally of ``SLOTS`` zeros with ``FIRST`` at -1.

    Args:
        kind: Stands for the source's dtype.
        at: ``values`` is read, ``codes`` and ``scales`` are written.
        rule: How maxima become scales.
        figures: Also sum squares and errors.
        tally: int64 ``[SLOTS]``; ``FIRST`` becomes the number of the first block that is not finite, in order of rows,
            ``TOP`` the float32 bits of the largest finite block maximum.
    """
    zero, saturated, nonfinite, first, top = 0, 0, 0, -1, 0
    sums = tally.ctypes.data
    for row in range(at.rows):
        for block in range(at.blocks):
            values = at.values + row * at.values_stride + block * LANES * at.element_bytes
            codes = at.codes + row * at.codes_stride + block * LANES
            largest = _largest(kind, values)
            scale = max((largest + rule.add) >> 23, 8) - 8
            if largest >= INFINITE:
                scale = rule.infinite if largest == INFINITE else NAN_SCALE
                first = row * at.blocks + block if nonfinite == 0 else first
                nonfinite += 1
                _encode_nonfinite(kind, values, codes, scale)
            else:
                if _is_bf16(kind) and scale >= WORDS_FROM:
                    _encode_words(values, codes, scale)
                else:
                    zero += largest == 0
                    _encode_floats(kind, values, codes, scale)
                top = max(top, largest)
                saturated += largest > ((scale + 8) << 23) + 0x600000
                if figures:
                    _add_errors(kind, values, codes, scale, sums)
            _put(at.scales + row * at.scales_stride + block, scale)
    tally[ZERO], tally[SATURATED], tally[NONFINITE], tally[FIRST], tally[TOP] = zero, saturated, nonfinite, first, top


@_compiled
def decode_rows(kind: Any, at: Rows) -> None:
    """Write the values of rows of codes; ``kind`` stands for float32 or BF16."""
    for row in range(at.rows):
        for block in range(at.blocks):
            values = at.values + row * at.values_stride + block * LANES * at.element_bytes
            scale = _get(at.scales + row * at.scales_stride + block)
            _decode(kind, values, at.codes + row * at.codes_stride + block * LANES, scale)
