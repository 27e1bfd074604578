"""Files of ranks whose node does not share the file system of rank 0."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rlhf_pipeline.distributed.world import World
from rlhf_pipeline.runtime import heartbeat
from rlhf_pipeline.runtime.digests import PIECE, FileEntry, read_pieces, write_pieces
from rlhf_pipeline.runtime.program import SEPARATE_FILES


def has_separate_files() -> bool:
    """Whether this rank's node has a file system of its own."""
    return SEPARATE_FILES in os.environ


def leads_file_system(world: World) -> bool:
    """Whether this rank makes and removes the folders that the ranks of its file system share."""
    return world.rank == 0 or (has_separate_files() and os.environ["LOCAL_RANK"] == "0")


def collect(world: World, folder: Path, own: Mapping[str, FileEntry]) -> None:
    """Copy the files that ranks wrote on other file systems into the same folder at rank 0.

    All ranks call this together. Returns after the last file.

    Args:
        world: the ranks. They exchange pieces in main memory.
        folder: the folder, which exists at rank 0 with its subfolders.
        own: the files that this rank wrote, by path relative to the folder.

    Raises:
        OSError: the copy differs from the file that was written.
    """
    files = world.gather({n: asdict(e) for n, e in own.items()} if has_separate_files() else {})
    for sender, entries in enumerate(files):
        for name, entry in entries.items():
            if world.rank == sender:
                _send(world, 0, folder / name)
            elif world.rank == 0:
                _receive(world, sender, folder / name, FileEntry(**entry))


def spread(world: World, folder: Path) -> None:
    """Copy a folder of rank 0 to the same place on each other file system.

    All ranks call this together. Returns after the last file.
    """
    leaders = [rank for rank, leads in enumerate(world.gather(leads_file_system(world))) if leads]
    own: dict[str, dict[str, Any]] = {}
    if len(leaders) > 1 and world.rank == 0:
        names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        own = {str(name): asdict(FileEntry.of(folder / name)) for name in names}
    files = world.gather(own)[0]
    for leader in leaders[1:]:
        for name, entry in files.items():
            if world.rank == 0:
                _send(world, leader, folder / name)
            elif world.rank == leader:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _receive(world, 0, folder / name, FileEntry(**entry))
    world.barrier()


def _send(world: World, receiver: int, path: Path) -> None:
    for piece in read_pieces(path):
        send = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        torch.distributed.send(send, receiver, group=world.host)
        heartbeat.tick()


def _receive(world: World, sender: int, path: Path, entry: FileEntry) -> None:
    def pieces() -> Iterator[memoryview]:
        for start in range(0, entry.size, PIECE):
            piece = torch.empty(min(PIECE, entry.size - start), dtype=torch.uint8)
            torch.distributed.recv(piece, sender, group=world.host)
            yield piece.numpy().data

    if write_pieces(path, pieces()) != entry:
        raise OSError(f"{path} changed while rank {world.rank} received it from rank {sender}")
