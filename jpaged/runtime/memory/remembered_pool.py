"""Size of the KV pool of an earlier start, kept in the folder of the compile cache."""

import dataclasses
import hashlib
import json
import pathlib


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of an earlier start."""

    num_blocks: int
    temp_bytes: int  # largest temporary device memory of a program

    def still_fits(self, num_blocks: int) -> bool:
        """Whether it fits where `num_blocks` blocks do, and wastes at most an eighth of them."""
        return num_blocks * 7 // 8 <= self.num_blocks <= num_blocks


def remembered_pool(folder: pathlib.Path | None, key: str) -> PoolSize | None:
    """Pool of an earlier start with the same key. None: there is none, or its file is damaged.

    So programs in the compile cache stay usable if free memory differs slightly between starts, and their temporaries
    are known without compiling. folder: of the compile cache; None = there is none.
    """
    if folder is None:
        return None
    try:
        found = json.loads(_pool_file(folder, key).read_text())
        pool = PoolSize(int(found["num_blocks"]), int(found["temp_bytes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pool if pool.num_blocks > 0 and pool.temp_bytes >= 0 else None


def remember_pool(folder: pathlib.Path | None, key: str, pool: PoolSize) -> None:
    """Keep a pool's size for `remembered_pool`. folder: None = keep nothing."""
    if folder is not None:
        file = _pool_file(folder, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**dataclasses.asdict(pool), "key": key}))


def _pool_file(folder: pathlib.Path, key: str) -> pathlib.Path:
    return folder / f"pool-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
