"""A disk without files, and other engines: what ``FakeExecutor`` reads pages from and writes to."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rayfin.actors.messages import HOST, Int32Array, PageTransfer
from rayfin.cache.page_files import PageFolder

if TYPE_CHECKING:
    from fake_runner import FakeExecutor


@dataclass(frozen=True)
class FakeFolder(PageFolder):
    """Tokens and content of pages by hash."""

    pages: dict[bytes, tuple[Int32Array, Int32Array]] = field(default_factory=dict)
    broken: set[bytes] = field(default_factory=set)  # files that prove useless
    others: dict[str, "FakeFolder"] = field(default_factory=dict)  # of other weights, by digest

    def of(self, digest: str) -> "FakeFolder":
        if not digest:
            return self
        return self.others.setdefault(digest, FakeFolder(self.path, digest, self.max_bytes))

    def holds(self, page_hash: bytes) -> bool:
        return page_hash in self.pages


def fake_folder() -> FakeFolder:
    return FakeFolder("/nowhere", "toy", 1 << 30)


@dataclass(slots=True)
class FakeTransfer:
    """Carried out when it is due and the steps before it have run, or never if its runner died."""

    executor: "FakeExecutor"
    what: PageTransfer
    due: float  # seconds of the executor's clock
    epoch: int
    after: int  # the step that must have run
    content: list[Int32Array]  # of the pages when it was sent
    moved: int | None = None

    def done(self) -> bool:
        executor = self.executor
        if self.moved is None:
            if executor.is_dead or executor.asleep or executor.epoch != self.epoch:
                self.moved = 0
            elif self.what.forget or executor.clock >= self.due:
                if self.what.write:
                    self.moved = self._write()
                elif executor.has_run(self.after):
                    self.moved = self._read()
        return self.moved is not None

    def count(self) -> int:
        assert self.moved is not None
        return self.moved

    def _read(self) -> int:
        what, executor, folder = self.what, self.executor, self._folder
        if what.named is not None:
            executor.names.add(what.named, (self.epoch, self.after))
        if what.source == HOST:
            return self._read_host()
        for number, (page, page_hash) in enumerate(zip(what.pages, what.hashes, strict=True)):
            if page_hash in folder.broken:
                folder.pages.pop(page_hash, None)
            if page_hash not in folder.pages:
                return number
            tokens, content = folder.pages[page_hash]
            assert np.array_equal(tokens, what.tokens[number])
            if not number and what.moves is not None:
                executor.keep(what.moves)
            executor.fill(page, content, made=executor.version)
        return len(what.pages)

    def _read_host(self) -> int:
        what, executor = self.what, self.executor
        if what.moves is not None:
            executor.keep(what.moves)
        for number, (page, page_hash) in enumerate(zip(what.pages, what.hashes, strict=True)):
            if (held := executor.in_host(page_hash)) is None:
                return number
            content, made = held
            assert (made == executor.version).all(), "pages of other weights"
            executor.fill(page, content, made=executor.version)
        return len(what.pages)

    def _write(self) -> int:
        if self.what.forget:
            self._folder.pages.clear()
        for number, (page, page_hash) in enumerate(
            zip(self.what.pages, self.what.hashes, strict=True)
        ):
            content = self.executor.content(page)
            assert np.array_equal(content, self.content[number]), "a page has changed"
            self._folder.pages[page_hash] = self.what.tokens[number], content
        return len(self.what.pages)

    @property
    def _folder(self) -> FakeFolder:
        folder = self.executor.config.page_folder
        if self.what.source or folder is None:
            folder = self.executor.peers.get(self.what.source, fake_folder())
        assert isinstance(folder, FakeFolder)
        return folder.of(self.executor.digest)
