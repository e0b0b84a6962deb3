"""Run a model over a data set and keep values on disk.

- `harvest(model, data, where, to=folder)`: does it, and goes on after a crash → `Store`

docs/harvesting.md tells the rest: padding, statistics, many ranks, and the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hookline.errors import HarvestError, HooklineError
from hookline.harvests.background_thread import BackgroundThread
from hookline.harvests.fingerprints import digest
from hookline.harvests.harvest_plan import describe, plan_for, refuse_changes
from hookline.harvests.harvest_statistics import RankStatistics, are_sound
from hookline.harvests.progress import Progress
from hookline.harvests.rank_batches import BatchSource, RankShare, rank_and_world_size
from hookline.harvests.rank_completion import earlier, finish, open_writer, unfinish
from hookline.harvests.row_extraction import BatchRows, RowExtractor, RowOptions, rows_in, sizes_in
from hookline.places.resolution import Where
from hookline.statistics.measuring import Statistics
from hookline.storage.store import Store
from hookline.storage.store_writer import StoreWriter
from hookline.torch_checks import require

__all__ = ["harvest"]

_Item = tuple[int, int, BatchRows]  # the number of a batch, what it is known by, and its rows


def harvest(
    model: nn.Module,
    data: Any,
    where: Where,
    *,
    to: str | os.PathLike[str],
    at: Any = None,
    transform: Callable[[Any], Any] | None = None,
    dtype: torch.dtype | None = None,
    stop: bool | Literal["auto"] = "auto",
    mask: str | Callable[[Any], Any] | None = None,
    ids: str | Callable[[Any], Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    statistics: Statistics | None = None,
    quiet: bool = False,
) -> Store:
    """Run a model over data and store the values at places; run again, it goes on.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> data = torch.randn(100, 4).split(32)
    >>> store = harvest(model, data, "1", to=tempfile.mkdtemp() + "/acts", quiet=True)
    >>> len(store), store["1"].shape
    (100, torch.Size([100, 3]))

    Args:
        model: any module. It runs in the mode in which it is, without gradients.
        data: batches: a DataLoader, a list, any iterable, or a function that returns one (and is
            given the number of the first batch that is needed, if it takes an argument). A tensor
            is the model's argument, a tuple or list are its arguments, a dict its arguments by
            name, any other object is its argument. They must come in the same order each time.
        where: places, or anything else that `select` takes.
        to: the folder of the store. If a harvest there was stopped, it is completed.
        at: take only this slice of each value, or what a function makes of it; `last_token`
            itself, with a mask, is the last token of each sequence.
        transform: a function of the value (after `at`); what it returns is stored.
        dtype: how to store floating-point values.
        stop: "auto" ends each forward after the last place that is needed, unless the rest of it
            draws random numbers or changes buffers; True always does, once each place has fired,
            and takes the first call of each; False never.
        mask: which positions of a sequence are stored, nonzero for tokens and zero for padding: the
            name of a part of the batch, or a function of it. Samples then vary in length.
        ids: a number or a word for each sample: the name of a part of the batch, or a function of
            it. Without, samples are numbered as they come in the data. A part of a dict that is
            named here or as the mask is given to the model only if it takes such an argument.
        forward: a function of the model and a batch that runs the one on the other.
        statistics: `Mean()`, `TopK(k=5)` and so on, measured of what is stored and saved in
            the folder `statistics` of the store, for `Measurements.load`.
        quiet: show neither the plan nor the progress, which go to stderr.

    First the plan is shown; what will not fit on the disk is refused. While the model runs,
    another thread writes. After Ctrl-C, a crash or kill -9 the store is sound, and the same call
    completes it, without a duplicate and without a gap, if nothing else was changed: another
    model, other places, options or data are refused.

    Under torchrun and the like (the variables RANK and WORLD_SIZE) each rank takes its share of
    the batches. Rank 0 waits for the others and returns the whole store; what the others return may
    lack what is still being written.
    """
    require("tools")
    taking = RowOptions(at, transform, dtype, stop, mask, ids, forward)
    rank, world = rank_and_world_size()
    work = _Harvest(
        RowExtractor(model, where, taking), BatchSource(data), Path(to).absolute(), rank, world
    )
    if statistics is not None:
        work.measuring = RankStatistics(statistics, work.folder, rank, world)
    work.progress = Progress(quiet=quiet or rank > 0)
    try:
        work.run()
    finally:
        work.progress.end()
    return Store.open(work.folder)


class _Harvest:
    """The harvest of one rank."""

    measuring: RankStatistics | None = None
    progress: Progress
    writer: StoreWriter
    grown = False  # whether samples came: what was said of all is gone then

    def __init__(
        self, taker: RowExtractor, source: BatchSource, folder: Path, rank: int, world: int
    ) -> None:
        self.taker, self.source, self.folder = taker, source, folder
        self.world = world
        self.wanted = describe(taker, world)
        refuse_changes(folder, self.wanted)
        before = earlier(folder, rank)
        self.before, self.mark = before, before.mark
        taker.go_on(before.series)
        self.share = RankShare(rank, world, self.mark.get("batch", -1))
        self.numbered = before.samples  # samples that have an id, of a single rank
        self.named: tuple[int, Any] = -1, None  # the number of a batch, and its ids
        self.sizes: dict[Any, int] = {}  # in batch 0, of the tensors that may hold the samples
        # The batch that is smaller than the first, of several ranks: samples behind it would be
        # numbered wrongly.
        self.short = self.share.last if self.mark.get("short") else None

    def run(self) -> None:
        """Write what is missing of this rank's share, and finish."""
        self.source.begin(self.share.rank if self.share.last < 0 else self.share.last)
        with closing(self._batches()) as batches:  # else an error keeps workers that load them
            self._run(batches)

    def _run(self, batches: Iterator[tuple[int, Any]]) -> None:
        length = self.source.length
        begun = [self._item(*first) for first in islice(batches, 1)]
        if begun:
            self._plan(begun[0][2], length)
            if self.measuring is not None:
                self.measuring.check(begun[0][2].ids)
        elif self._is_complete():
            self.progress.show(f"complete: {str(self.folder)!r}")
            return
        with open_writer(self.folder, self.share.rank, self.wanted) as self.writer:
            if (self.writer.mark, self.writer.samples) != (self.mark, self.before.samples):
                raise HarvestError(
                    f"A harvest was to go on in {str(self.folder)!r}.",
                    "Another process has written there as the same rank in the meantime.",
                    "Run it again, once, to see whether something is missing.",
                )
            if self.measuring is not None:
                self.measuring.catch_up()
            if begun:
                self._write_all(begun, batches)
                self.progress.end()
            self._save()
            kinds = None if self.measuring is None else self.measuring.kinds
            done = {"done": True, "batches": self._count(), "kinds": kinds}
            self.writer.note({**self.writer.mark, **done, "length": self.source.batches})
            if self.share.rank == 0 and self.world > 1:
                self.progress.show("done with the share of rank 0; waiting for the others")
            finish(self.writer, self.world, kinds)
        self.progress.show(f"done: {str(self.folder)!r}")

    def _is_done(self) -> bool:
        """Whether this rank has written its share of data that was as long as this."""
        return bool(self.mark.get("done")) and self.mark.get("length") == self.source.batches

    def _is_complete(self) -> bool:
        """Whether there is nothing to write, so that the folder may even be a sealed one."""
        measured = self.measuring is None or (
            self.mark.get("kinds") == self.measuring.kinds and are_sound(self.folder)
        )
        return self._is_done() and measured and (self.folder / "harvest.json").exists()

    def _plan(self, taken: BatchRows, length: int | None) -> None:
        share = self.share
        batches = None if length is None else share.done() + share.size(length)
        stops = self.taker.stops
        plan = plan_for(taken, self.folder, batches, share.done(), self.world, stops)
        self.progress.show(repr(plan))
        plan.check_space()
        self.progress.begin(batches, share.done())

    def _write_all(self, begun: list[_Item], batches: Iterator[tuple[int, Any]]) -> None:
        try:
            with BackgroundThread(self._write) as background:
                background.put(begun.pop())  # whoever keeps it keeps its memory for the whole run
                for number, batch in batches:
                    background.put(self._item(number, batch))
        except BaseException as error:
            with suppress(Exception):  # the first error counts; what is not saved is made again
                self._save()
            # An error of ours would come again; one of the disk, the data or the model may not.
            recurs = isinstance(error, HooklineError) and not isinstance(error.__cause__, OSError)
            error.add_note(
                f"hookline: the store in {str(self.folder)!r} is sound and has "
                f"{self.writer.samples} samples"
                + ("." if recurs else "; the same harvest again goes on from there.")
            )
            raise

    def _save(self) -> None:
        """Save the statistics, unless they are ahead of what could be written."""
        measuring = self.measuring
        if measuring is not None and measuring.samples == self.writer.samples:
            measuring.save(self._count(), now=True)

    def _item(self, number: int, batch: Any) -> _Item:
        return number, self._known(number, batch), self._take(number, batch)

    def _write(self, item: _Item) -> None:
        """On the thread: a batch, its statistics and how far we are, all or nothing."""
        number, known, taken = item
        mark: dict[str, Any] = {"batch": number, "known": known}
        if number == self.short:
            mark["short"] = True
        if not taken.samples:
            self.writer.note(mark)
        else:
            if not self.grown:
                self.grown = True
                unfinish(self.folder)
            if self.measuring is not None:
                self.measuring.update(taken.rows, taken.samples, taken.ids)
            self.writer.append(taken.rows, ids=taken.ids, mark=mark)
            if self.measuring is not None:
                self.measuring.save(self._count())
        self.progress.step(rows_in(taken.rows))

    def _count(self) -> int:
        last: int = self.writer.mark.get("batch", -1)
        return RankShare(self.share.rank, self.world, last).done()

    # -- the batches, and that they are the same --------------------------------------------------

    def _batches(self) -> Generator[tuple[int, Any]]:
        """The batches that this rank takes. Before the first one, all checks have been made."""
        number = -1
        checked = self.share.last < 0
        for number, batch in self.source.numbered(self.share):
            if number == 0 and not self.source.skips:
                self.sizes = sizes_in(batch)
                self.wanted["data"] = self._known(number, batch)
                refuse_changes(self.folder, self.wanted)
                if self._is_done() and self.source.length is not None and not self.source.jumps:
                    return  # as long as before, and all of it would have to be loaded
            if number == self.share.last:
                checked = True
                if self._known(number, batch) != self.mark.get("known"):
                    self._refuse(f"Batch {number}, the last one that was stored, differs.")
            if self.share.takes(number):
                if not checked:
                    self._refuse(f"Batch {self.share.last}, the last one stored, is missing.")
                self._refuse_behind_short(number)
                yield number, batch
        self._refuse_behind_short(self.source.last)
        if number < 0 and not self.source.skips:
            raise HarvestError(
                f"A harvest into {str(self.folder)!r} was asked for.",
                "The data has no batches; a generator that was gone through before has none left.",
                "Give a list, a loader, or a function that returns batches.",
            )
        if not checked:
            self._refuse(f"It ends before batch {self.share.last}, the last one that was stored.")

    def _known(self, number: int, batch: Any) -> int:
        """What a batch is known by: its ids, if the caller gives some, or its content."""
        own = self._ids(number, batch)
        return digest(batch if own is None else own)

    def _ids(self, number: int, batch: Any) -> Any:
        """What the caller names the samples of a batch; asked for once, as a function may count."""
        if number != self.named[0]:
            self.named = number, self.taker.taking.ids_of(batch)
        return self.named[1]

    def _refuse(self, found: str) -> None:
        raise HarvestError(
            f"A harvest was to go on in {str(self.folder)!r}.",
            f"The data is not the same: {found}",
            "Give the data in the same order each time (shuffle=False), or give ids=, which are "
            "then compared instead. Or choose another folder.",
        )

    def _take(self, number: int, batch: Any) -> BatchRows:
        taken = self.taker.take(batch, self._ids(number, batch))
        if taken.ids is not None:
            return taken
        if self.world == 1:
            first = self.numbered
            self.numbered += taken.samples
        else:
            first = number * self._size(number, taken.samples, sizes_in(batch))
        return BatchRows(taken.rows, taken.samples, range(first, first + taken.samples))

    def _size(self, number: int, samples: int, sizes: dict[Any, int]) -> int:
        """How many samples batch 0 has, which another rank may run."""
        self.sizes = {k: size for k, size in self.sizes.items() if sizes.get(k) == samples}
        found = set(self.sizes.values())
        if len(found) != 1 or samples > max(found):
            shown = " or ".join(map(str, sorted(found))) or "nobody knows how many"
            told = f"It has {samples}; the first batch has {shown}"
            told += ", as the data is a function of the number to begin with" * self.source.skips
            raise self._unnumbered(number, f"{told}.")
        if samples < max(found):
            self.short = number
            self._refuse_behind_short(self.source.last)
        return found.pop()

    def _refuse_behind_short(self, number: int) -> None:
        """An error if there is a batch behind the one that is smaller than the first."""
        if self.short is not None and number > self.short:
            found = f"It has fewer than the first batch, and is not the last: {number} is there."
            raise self._unnumbered(self.short, found)

    def _unnumbered(self, number: int, found: str) -> HarvestError:
        return HarvestError(
            f"The samples of batch {number} were to be numbered, on {self.world} ranks.",
            found,
            "Give ids=, or a function without an argument."
            if self.source.skips
            else "Let all batches but the last have the same size, or give ids=.",
        )
