"""The list of shards, on every rank."""

from typing import Literal, NamedTuple

from clip_train import dist
from clip_train.data.index import Address, ShardIndex, index_of
from clip_train.data.keep import Keep
from clip_train.errors import RankError
from clip_train.processes import node_name
from clip_train.storage.config import StorageConfig


class Offer(NamedTuple):
    """The list that one rank of a node has read, for the others of the node."""

    fingerprint: str
    address: Address


def shared_index(
    key: str,
    spec: str,
    verify: Literal["auto", "off"],
    storage: StorageConfig,
    known: ShardIndex | None = None,
    keep: Keep | None = None,
) -> ShardIndex:
    """The shards of `data.train` or `data.val` on every rank. One rank of each node lists them and
    reads their index; the others map it into their memory. Collective.

    key, spec: the key of the recipe and its value. verify: as `data.verify`. known: the result if
    this rank has looked before. keep: as in `look_up`. RankError if nodes see different lists.
    """

    def look() -> ShardIndex:
        return known or index_of(spec, verify, storage, key, keep)

    looks = dist.is_first_of_node()
    found = dist.agreed(lambda: look() if looks else None)
    offer: Offer | None = None
    if found is not None:
        offer = Offer(found.fingerprint(), found.shared.address)
    # by node, rank 0's first
    offers: dict[str, Offer] = {}
    for node, offered in dist.gather_objects((node_name(), offer)):
        if offered is not None:
            offers[node] = offered
    first = next(iter(offers))
    others = sorted(
        node for node in offers if offers[node].fingerprint != offers[first].fingerprint
    )
    if others:
        dist.raise_agreed(  # all ranks know it: for an evaluation it is a warning
            RankError(
                f"{key} ({spec}) is not the same list of shards on all nodes: {', '.join(others)} "
                f"and {first} differ; mount it on all"
            )
        )

    def take() -> ShardIndex:
        if found is not None:
            return found
        try:
            return ShardIndex.opened(offers[node_name()].address)
        except OSError:  # a container of its own on that node
            return look()

    return dist.agreed(take)
