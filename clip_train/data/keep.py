"""`data.keep`: the samples that a run reads, as a list of uids (DataComp's `.npy`) or an expression
over the columns of an index, such as `clip_score > 0.28 and lang == "en"`.

An expression is parsed by Python's `ast` and computed by numpy; it is never evaluated as Python. A
comparison with a missing value is false.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from clip_train.data.fields import key_of
from clip_train.errors import UserError, unreadable
from clip_train.storage.config import StorageConfig
from clip_train.storage.redact import redact
from clip_train.storage.urls import is_remote, local_path, open_read

LIST_EXTENSION = ".npy"
UID_COLUMN = "uid"  # DataComp's name for it in a sample's .json
# A uid of 32 hexadecimal digits: its first and its last 16.
UID = np.dtype([("f0", "<u8"), ("f1", "<u8")])
UID_PATTERN = re.compile(r"[0-9a-fA-F]{32}")
DIGITS = 16  # of the sha256 of a list
LARGEST_BUCKET = (
    64  # uids of a list whose first bits are equal; uids are hashes, so most have 1 or 2
)

Mask = Any  # bool [n] of n samples: those that are kept
Columns = Mapping[str, Any]  # by name: an array [n] of numbers, bytes or uids

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}


def is_list(keep: str) -> bool:
    """Whether `data.keep` names a file of uids; otherwise it is an expression."""
    return keep.lower().endswith(LIST_EXTENSION)


def uid_of(text: str) -> tuple[int, int]:
    """The two halves of 32 hexadecimal digits."""
    return int(text[:16], 16), int(text[16:], 16)


# -- expressions


class ExpressionError(ValueError):
    """An expression that cannot be used, and why."""


@dataclass(frozen=True)
class Expression:
    """A condition over columns."""

    tree: ast.expr
    columns: tuple[str, ...]  # the names in it, sorted

    @classmethod
    def parse(cls, text: str) -> Expression:
        """Raises ExpressionError."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            reason = e.msg if isinstance(e, SyntaxError) else str(e)
            raise ExpressionError(f"it is not an expression ({reason})") from None
        names: set[str] = set()
        _check(tree, names)
        if not names:
            raise ExpressionError("it names no column")
        return cls(tree, tuple(sorted(names)))

    @property
    def identity(self) -> str:
        """Equal for expressions that are the same but for blanks, brackets and quotes."""
        return ast.unparse(self.tree)

    def mask(self, columns: Columns) -> Mask:
        """Raises ExpressionError for a comparison of a number with a text."""
        num = len(columns[self.columns[0]])
        with np.errstate(all="ignore"):
            return np.broadcast_to(_condition(self.tree, columns), (num,))


def _column(node: ast.expr) -> str | None:
    """The column that a node names: `clip_score`, `json.clip_score` or `json["clip-score"]`."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=inner, attr=attribute):
            outer = _column(inner)
            return None if outer is None else key_of(f"{outer}.{attribute}")
        case ast.Subscript(value=ast.Name(id="json"), slice=ast.Constant(value=str(name))):
            return name
    return None


def _check(node: ast.expr, names: set[str]) -> None:
    """Add the columns of a node to `names`. ExpressionError for anything but what `_condition` and
    `_value` compute."""
    name = _column(node)
    if name is not None:
        names.add(name)
        return
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            parts: list[ast.expr] = []
        case ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            parts = [operand]
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
            parts = [left, right]
        case ast.Compare(left=left, ops=signs, comparators=others):
            parts = [left]
            for sign, other in zip(signs, others, strict=True):
                parts += _operands(sign, other)
        case _:
            raise ExpressionError(
                f"{ast.unparse(node)} is not allowed: write column names, numbers, texts in "
                "quotes, + - * /, comparisons, in (...), and, or, not"
            )
    for part in parts:
        _check(part, names)


def _operands(sign: ast.cmpop, other: ast.expr) -> list[ast.expr]:
    """The expressions on the right side of a comparison. ExpressionError."""
    if type(sign) in _COMPARISONS:
        return [other]
    is_member = isinstance(sign, ast.In | ast.NotIn)
    if is_member and isinstance(other, ast.Tuple | ast.List) and other.elts:
        return other.elts
    raise ExpressionError(
        f"{ast.unparse(other)}: compare by <, <=, >, >=, == or !=, or by in with values in brackets"
    )


@dataclass(frozen=True)
class _Value:
    """Numbers, texts or uids: one for each sample, or the same for all."""

    kind: Literal["number", "text", "uid"]
    data: Any

    @property
    def is_present(self) -> Any:
        if isinstance(self.data, bytes | int | float):
            return True
        if self.kind == "uid":
            return (self.data["f0"] != 0) | (self.data["f1"] != 0)
        if self.kind == "text":
            return self.data != b""
        return ~np.isnan(self.data)


def _condition(node: ast.expr, columns: Columns) -> Any:
    match node:
        case ast.BoolOp(op=junction, values=parts):
            both = np.logical_and if isinstance(junction, ast.And) else np.logical_or
            return functools.reduce(both, (_condition(part, columns) for part in parts))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return np.logical_not(_condition(operand, columns))
        case ast.Compare(left=left, ops=signs, comparators=others):
            conditions = []
            value = _value(left, columns)
            for sign, other in zip(signs, others, strict=True):
                values = [_value(each, columns) for each in _operands(sign, other)]
                conditions.append(_compared(value, sign, values, node))
                value = values[-1]
            return functools.reduce(np.logical_and, conditions)
    value = _value(node, columns)
    if value.kind != "number":
        raise ExpressionError(f"{ast.unparse(node)} is a {value.kind}, not a condition")
    return np.logical_and(value.is_present, value.data != 0)


def _compared(left: _Value, sign: ast.cmpop, values: list[_Value], node: ast.expr) -> Any:
    """left < values[0] and its like; left in values."""
    if type(sign) in _COMPARISONS:
        compare = _COMPARISONS[type(sign)]
        (right,) = values
        present = np.logical_and(left.is_present, right.is_present)
        return np.logical_and(present, _of_one_kind(compare, left, right, node))
    equal = [_of_one_kind(operator.eq, left, right, node) for right in values]
    is_in = functools.reduce(np.logical_or, equal)
    wanted = np.logical_not(is_in) if isinstance(sign, ast.NotIn) else is_in
    return np.logical_and(left.is_present, wanted)


def _of_one_kind(
    compare: Callable[[Any, Any], Any], left: _Value, right: _Value, node: ast.expr
) -> Any:
    kinds = {left.kind, right.kind}
    if len(kinds) == 1 and kinds != {"uid"}:
        return compare(left.data, right.data)
    if kinds == {"uid", "text"} and compare in (operator.eq, operator.ne):
        uids, text = left.data, right.data
        if left.kind == "text":
            uids, text = text, uids
        digits = text.decode() if isinstance(text, bytes) else ""
        if UID_PATTERN.fullmatch(digits) is not None:
            first, last = uid_of(digits)
            equal = (uids["f0"] == first) & (uids["f1"] == last)
            return equal if compare is operator.eq else ~equal
        raise ExpressionError(f"{ast.unparse(node)}: a uid is a text of 32 hexadecimal digits")
    raise ExpressionError(
        f"{ast.unparse(node)} compares a {left.kind} with a {right.kind}"
        + ("; a list of uids is a .npy" if "uid" in kinds else "")
    )


def _value(node: ast.expr, columns: Columns) -> _Value:
    name = _column(node)
    if name is not None:
        column = columns[name]
        kinds: dict[str, Literal["number", "text", "uid"]] = {"S": "text", "V": "uid"}
        return _Value(kinds.get(column.dtype.kind, "number"), column)
    match node:
        case ast.Constant(value=str(text)):
            return _Value("text", text.encode("utf-8", "surrogatepass"))
        case ast.Constant(value=number):
            return _Value("number", number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _Value("number", -_number(operand, columns))
        case ast.BinOp(left=left, op=operation, right=right):
            sides = (_number(side, columns) for side in (left, right))
            return _Value("number", _ARITHMETIC[type(operation)](*sides))
    # a condition that is compared: true is 1
    return _Value("number", _condition(node, columns))


def _number(node: ast.expr, columns: Columns) -> Any:
    """As float64: products of small integers would overflow."""
    value = _value(node, columns)
    if value.kind != "number":
        raise ExpressionError(f"{ast.unparse(node)} is a {value.kind}, not a number")
    return np.asarray(value.data, np.float64)


# -- lists of uids


@dataclass(frozen=True)
class UidList:
    """The uids of a `.npy`, sorted."""

    first: Any  # uint64 [k]: the first half of each
    last: Any  # uint64 [k]
    digest: str
    # [2^bits]: where the uids with these first bits begin; None: the uids are not spread evenly
    buckets: Any
    bits: int

    columns = (UID_COLUMN,)

    @classmethod
    def load(cls, place: str, storage: StorageConfig) -> UidList:
        """Raises UserError for a file that is missing or is not such a list."""
        what = f"data.keep ({redact(place)})"
        form = (
            "a list of uids is a .npy with one array of dtype('<u8,<u8'), as DataComp writes it: "
            "np.array([(int(u[:16], 16), int(u[16:], 16)) for u in uids], 'u8,u8')"
        )
        try:
            if is_remote(place):
                with open_read(place, storage) as file:
                    uids = np.load(io.BytesIO(file.read()), allow_pickle=False)
            else:
                uids = np.load(local_path(place), mmap_mode="r", allow_pickle=False)
        except OSError as e:
            raise unreadable(e, f"{what} cannot be read: {type(e).__name__}: {e}") from e
        except (ValueError, EOFError) as e:
            raise UserError(f"{what} is not an array of numpy ({e}); {form}") from e
        names = uids.dtype.names or ()
        if uids.ndim != 1 or [uids.dtype[name] for name in names] != [np.dtype("<u8")] * 2:
            raise UserError(f"{what} has dtype {uids.dtype} and shape {uids.shape}; {form}")
        if not len(uids):
            raise UserError(f"{what} is empty; write the uids into it, or set data.keep=null")
        first, last = (np.ascontiguousarray(uids[name]) for name in names)
        is_sorted = (first[:-1] < first[1:]) | ((first[:-1] == first[1:]) & (last[:-1] <= last[1:]))
        if not is_sorted.all():
            order = np.lexsort((last, first))
            first, last = first[order], last[order]
        digest = hashlib.sha256(first.data)
        digest.update(last.data)
        bits = max(1, len(first).bit_length() - 1)
        edges = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
        buckets = np.searchsorted(first, edges)
        if np.diff(buckets, append=len(first)).max() > LARGEST_BUCKET:
            buckets = None
        return cls(first, last, digest.hexdigest()[:DIGITS], buckets, bits)

    @property
    def identity(self) -> str:
        """Of the content: the file may move."""
        return f"{len(self.first):,} uids, sha256 {self.digest}"

    def mask(self, columns: Columns) -> Mask:
        """The samples whose uid is in the list. ExpressionError if the column has no uids."""
        uids = columns[UID_COLUMN]
        if uids.dtype != UID:
            raise ExpressionError(
                f"the column {UID_COLUMN} of the index has {uids.dtype}, and not uids of 32 "
                "hexadecimal digits"
            )
        first, last = np.ascontiguousarray(uids["f0"]), np.ascontiguousarray(uids["f1"])
        found = np.zeros(len(uids), bool)
        # the uids of the list with the same first half stand side by side: step through them
        place = self._places(first)
        todo = np.flatnonzero((first != 0) | (last != 0))
        while len(todo):
            todo = todo[place[todo] < len(self.first)]
            todo = todo[self.first[place[todo]] == first[todo]]
            found[todo] |= self.last[place[todo]] == last[todo]
            todo = todo[~found[todo]]
            place[todo] += 1
        return found

    def _places(self, first: Any) -> Any:
        """As `numpy.searchsorted(self.first, first)`. In a list of many uids, that takes 30 times as
        long, because each step of a binary search waits for the memory."""
        if self.buckets is None:
            return np.searchsorted(self.first, first)
        place = self.buckets[first >> np.uint64(64 - self.bits)].astype(np.int64)
        todo = np.arange(len(first))
        while len(todo):
            todo = todo[place[todo] < len(self.first)]
            todo = todo[self.first[place[todo]] < first[todo]]
            place[todo] += 1
        return place


@dataclass(frozen=True)
class Keep:
    """`data.keep` of a recipe."""

    text: str
    train: str  # data.train

    def load(self, storage: StorageConfig) -> Expression | UidList:
        """Raises UserError."""
        if is_list(self.text):
            return UidList.load(self.text, storage)
        try:
            return Expression.parse(self.text)
        except ExpressionError as e:
            raise UserError(f"{self}: {e}") from None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it needs. Raises ExpressionError."""
        return UidList.columns if is_list(self.text) else Expression.parse(self.text).columns

    def __str__(self) -> str:
        """For messages."""
        return f"data.keep ({redact(self.text)})"


class KeptRows:
    """The samples of a shard that `data.keep` keeps.

    bits: as `IndexedShard.kept`; None: all of them.
    """

    def __init__(self, bits: bytes | None) -> None:
        self.bits = bits
        if bits is not None:
            flags = np.unpackbits(np.frombuffer(bits, np.uint8))
            self._flags = flags.tobytes()  # for each sample of the archive, 0 or 1
            self._rows = np.flatnonzero(flags).astype(np.uint32)

    def rows(self, start: int, stop: int) -> Sequence[int]:
        """The numbers in the archive of kept samples [start, stop)."""
        return range(start, stop) if self.bits is None else self._rows[start:stop].tolist()

    def holds(self, number: int, first: int = 0) -> bool:
        """Whether sample `first + number` of the archive is kept."""
        if self.bits is None:
            return True
        return first + number < len(self._flags) and self._flags[first + number] == 1
