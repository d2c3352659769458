"""The rows of one rollout, below the plans of its parts.

    plans/<part>/groups/   finished groups, whatever becomes of them: a retry takes them in
    plans/<part>/cut/      what there was of groups that were cut off

A group in several shards counts from the first one, and of what was cut off the longest: it was
there when the other went on.

Not here: which groups are sampled (`sampler`), shards themselves (`rlpipe.store.parquet.shards`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from rlpipe.errors import ObjectMissing
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import ShardWriter, adopt, read_rows
from rlpipe.store.plans import Plans
from rlpipe.types import FileRecord, Plan, Sample

Groups = dict[str, list[Sample]]


class Part(NamedTuple):
    """One part of an iteration's plan, with its digest."""

    digest: str
    plan: Plan


class Rows(Protocol):
    """Where a rollout keeps its rows. Called on threads, one call at a time."""

    def adopt(self, part: Part) -> tuple[Groups, Groups]:
        """What an earlier attempt left of this part: its finished groups, and those it cut off."""
        ...

    def earlier(self, digest: str, group_ids: Collection[str]) -> Groups:
        """The rows of these groups below an earlier plan. Raises: ObjectMissing."""
        ...

    def write(self, part: Part, groups: Sequence[Sequence[Sample]], *, cut: bool = False) -> None:
        """Returns once they are safe."""
        ...


class StoredRows:
    """Rows in the store; `files` are the data files of the rollout's node."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._finished: list[FileRecord] = []
        self._cut: list[FileRecord] = []
        self._writers: dict[str, ShardWriter] = {}

    @property
    def files(self) -> list[FileRecord]:
        """Finished groups first: of a group that was cut off by one attempt and finished by
        another, those rows count."""
        return [*self._finished, *self._cut]

    def adopt(self, part: Part) -> tuple[Groups, Groups]:
        """See `Rows`."""
        finished = adopt(self._files, Plans.groups_prefix(part.digest))
        cut = adopt(self._files, Plans.cut_prefix(part.digest), every=True)
        self._finished += [record for record, _ in finished]
        self._cut += [record for record, _ in cut]
        return self._read(record for record, _ in finished), self._longest(
            record for record, _ in cut
        )

    def earlier(self, digest: str, group_ids: Collection[str]) -> Groups:
        """See `Rows`."""
        found: Groups = {}
        for prefix, read in (
            (Plans.groups_prefix(digest), self._read),
            (Plans.cut_prefix(digest), self._longest),
        ):
            missing = set(group_ids) - set(found)
            shards = adopt(self._files, prefix, every=True) if missing else []
            rows = read(record for record, groups in shards if missing & set(groups))
            found |= {
                group_id: samples for group_id, samples in rows.items() if group_id in missing
            }
        if missing := sorted(set(group_ids) - set(found)):
            raise ObjectMissing(
                "groups of the buffer have no rows",
                where=self._files.url(f"plans/{digest}"),
                found=f"no {missing}",
            )
        return found

    def write(self, part: Part, groups: Sequence[Sequence[Sample]], *, cut: bool = False) -> None:
        """See `Rows`."""
        prefix = Plans.cut_prefix(part.digest) if cut else Plans.groups_prefix(part.digest)
        if prefix not in self._writers:
            self._writers[prefix] = ShardWriter(self._files, prefix, part.plan.iteration)
        record = self._writers[prefix].write(groups)
        if cut:
            self._cut.insert(0, record)
        else:
            self._finished.append(record)

    def _read(self, records: Iterable[FileRecord]) -> Groups:
        records = list(records)
        return _grouped(table_to_samples(read_rows(self._files, records))) if records else {}

    def _longest(self, records: Iterable[FileRecord]) -> Groups:
        found: Groups = {}
        for record in records:
            for group_id, samples in self._read([record]).items():
                if group_id not in found or _tokens(samples) > _tokens(found[group_id]):
                    found[group_id] = samples
        return found


class KeptRows:
    """Rows in memory: nothing is adopted, nothing lasts."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def adopt(self, part: Part) -> tuple[Groups, Groups]:
        """See `Rows`."""
        return {}, {}

    def earlier(self, digest: str, group_ids: Collection[str]) -> Groups:
        """See `Rows`."""
        raise ObjectMissing("nothing is kept", where=digest, found=f"no {sorted(group_ids)}")

    def write(self, part: Part, groups: Sequence[Sequence[Sample]], *, cut: bool = False) -> None:
        """See `Rows`."""
        self.samples.extend(sample for group in groups for sample in group)


def _grouped(samples: Iterable[Sample]) -> Groups:
    groups: Groups = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return groups


def _tokens(samples: Iterable[Sample]) -> int:
    return sum(len(sample.response_ids) for sample in samples)
