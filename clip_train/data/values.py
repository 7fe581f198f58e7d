"""Values of each training sample beside its image and texts, which a loss reads as columns.

To add one: a `SampleValue` here, and its column's name in `Recipe.sample_values`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from clip_train.data.fields import key_of, metadata, scalar, without_case
from clip_train.task import NO_ID, sample_id


class SampleValue(Protocol):
    """Reads a value from the members of a sample. Picklable: it travels to the loader workers."""

    @property
    def synthetic(self) -> Any:
        """The value of samples of `data.kind: synthetic`, which have no members."""

    def __call__(self, members: Mapping[str, Any], texts: Sequence[str]) -> Any:
        """A tensor, a number or a string, of one type and shape for all samples. float becomes
        float32 [n] of the column, and int int64 [n]. Raises InvalidSample: then another sample
        replaces this one, and it is counted.

        members: as the stages leave them. texts: as they were chosen for the sample.
        """


@dataclass(frozen=True)
class GroupId:
    """The number of a sample's group, equal for its samples, which are not negatives of each other.
    groups: as `loss.groups`."""

    groups: str
    synthetic: ClassVar[int] = NO_ID

    def __call__(self, members: Mapping[str, Any], texts: Sequence[str]) -> int:
        return sample_id(group_name(members, texts[0], self.groups))


def group_name(members: Mapping[str, Any], caption: str, groups: str) -> str | None:
    """The name of a sample's group; None: it is in no group. groups: as `loss.groups`.

    caption: the sample's first text. Its case and its blanks do not distinguish groups.
    """
    if groups == "caption":
        return without_case(caption)
    value = scalar(metadata(members).get(key_of(groups)))
    return None if value is None else str(value)
