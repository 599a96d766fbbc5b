"""Keys and values of past tokens, preallocated, with a write position per row.

Target and heads use the same class. Shapes: B rows, L layers, G key-value heads of a layer, S slots, E head width, N new
tokens. Slot s of row b holds position `positions[b, s]`; slots at and beyond `lengths[b]` are free, and nothing
ever attends to them.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwright.data.batch import to_device


class KVCache:
    """A cache for B rows of at most S tokens.

    Writing is two-phase: `write()` puts new keys and values behind the row's tokens, `advance()` declares them part of
    the row. A tree is verified between the two: `keep()` advances by the accepted path only.
    """

    def __init__(self, layers: int, batch: int, slots: int, device: torch.device):
        # Made by the first write: layers differ in heads and width, and may lie on several devices.
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        self.lengths = [0] * batch  # on the host: one cycle of decoding already returns tokens there

    @property
    def slots(self) -> int:
        """Capacity of each row."""
        return self.positions.shape[1]

    @property
    def device(self) -> torch.device:
        """Where positions and masks live."""
        return self.positions.device

    def room(self, new: int) -> int:
        """The end of the slots in use once `new` tokens are written to every row."""
        end = max(self.lengths) + new
        if end > self.slots:
            raise ValueError(f"cache of {self.slots} slots is too small: {end} are needed")
        return end

    def make_room(self, new: int) -> None:
        """More slots, if `new` tokens in every row would not fit. Drafts of a shape that was not expected are no error."""
        short = max(self.lengths) + new - self.slots
        if short > 0:
            short = max(short, self.slots // 4)  # or the next draft would copy everything again
            with torch.inference_mode(False):
                for kept in (self.keys, self.values):
                    kept[:] = [store if store is None else F.pad(store, (0, 0, 0, short)) for store in kept]
                self.positions = F.pad(self.positions, (0, short))

    def next_slots(self, new: int) -> Tensor:
        """Slots [B, N] that the next `new` tokens of each row take."""
        start = to_device(torch.tensor(self.lengths), self.device)
        return start[:, None] + torch.arange(new, device=self.device)

    def write(self, layer: int, keys_BGNE: Tensor, values_BGNE: Tensor) -> tuple[Tensor, Tensor]:
        """Put new entries behind each row's tokens; return the keys and values of all slots in use."""
        new = keys_BGNE.shape[2]
        end = self.room(new)
        keys, values = (
            self.store(kept, layer, made) for kept, made in ((self.keys, keys_BGNE), (self.values, values_BGNE))
        )
        if len(set(self.lengths)) == 1:
            start = self.lengths[0]
            keys[:, :, start:end] = keys_BGNE
            values[:, :, start:end] = values_BGNE
        else:
            rows = torch.arange(len(self.lengths), device=keys.device)[:, None]
            slots = self.next_slots(new).to(keys.device)
            keys[rows, :, slots] = keys_BGNE.transpose(1, 2)
            values[rows, :, slots] = values_BGNE.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def store(self, kept: list[Tensor | None], layer: int, made_BGNE: Tensor, batch: int | None = None) -> Tensor:
        """The tensor [B, G, S, E] of one layer, made if need be."""
        tensor = kept[layer]
        if tensor is None:
            rows, heads, _, width = made_BGNE.shape
            shape = (batch or rows, heads, self.slots, width)
            with torch.inference_mode(False):  # or nobody outside inference mode could keep a path
                tensor = kept[layer] = torch.zeros(shape, dtype=made_BGNE.dtype, device=made_BGNE.device)
        return tensor

    def place(self, positions_BN: Tensor) -> None:
        """Record the positions of the tokens about to be written."""
        new = positions_BN.shape[1]
        self.room(new)
        self.positions.scatter_(1, self.next_slots(new), positions_BN)

    def visible(self, new: int, among_BNN: Tensor | None = None) -> Tensor:
        """Attention mask [B, N, S']: each new token sees its row's tokens, and the new ones that `among` allows.

        Without `among` the new tokens are a causal continuation.
        """
        end = self.room(new)
        batch = len(self.lengths)
        start = to_device(torch.tensor(self.lengths), self.device)[:, None, None]
        mask = (torch.arange(end, device=self.device) < start).expand(batch, new, end).clone()
        if among_BNN is None:
            among_BNN = torch.ones(new, new, dtype=torch.bool, device=self.device).tril().expand(batch, new, new)
        return mask.scatter_(2, self.next_slots(new)[:, None, :].expand(batch, new, new), among_BNN)

    def seen(self, new: int) -> Tensor | None:
        """`visible` of a continuation; None where it is a beginning, for which kernels need no mask."""
        return self.visible(new) if any(self.lengths) else None

    def advance(self, counts: int | Sequence[int]) -> None:
        """Declare the first `counts` written tokens of each row part of it."""
        counts = [counts] * len(self.lengths) if isinstance(counts, int) else counts
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Of the tokens written last to `row`, keep those with offsets `path` (ascending), moved together.

        Everything else that was written is gone: its slots are free again.
        """
        start = self.lengths[row]
        if list(path) != list(range(len(path))):
            source = to_device(torch.tensor(path) + start, self.device)
            target = slice(start, start + len(path))
            for store in (*self.keys, *self.values):
                if store is not None:
                    store[row, :, target] = store[row].index_select(1, source.to(store.device))
            self.positions[row, target] = self.positions[row, source]
        self.lengths[row] += len(path)

    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """`keep` for every row: of the tokens written last, those with the given offsets."""
        moved = [row for row, path in enumerate(paths) if list(path) != list(range(len(path)))]
        if len(moved) > 1:
            self.move(moved, [paths[row] for row in moved])
        for row, path in enumerate(paths):
            if moved == [row]:
                self.keep(row, path)
            else:
                self.lengths[row] += len(path)

    def move(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Several rows' kept tokens to their places, in one copy for each layer; short paths are padded with offsets
        that stay.
        """
        longest = max(map(len, paths))
        padded = torch.tensor([[*path, *range(len(path), longest)] for path in paths])
        begins = torch.tensor([[self.lengths[row]] for row in rows])
        owners = to_device(torch.tensor(rows)[:, None], self.device)
        source = to_device(begins + padded, self.device)
        target = to_device(begins + torch.arange(longest), self.device)
        for store in (*self.keys, *self.values):
            if store is not None:
                there = store.device
                store[owners.to(there), :, target.to(there)] = store[owners.to(there), :, source.to(there)]
        self.positions[owners, target] = self.positions[owners, source]

    def put(self, row: int, other: "KVCache") -> None:
        """Let `row` hold what the only row of `other` holds: another text takes the place of one that has ended."""
        length = other.lengths[0]
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, made in enumerate(theirs):
                if made is not None:
                    self.store(mine, layer, made, len(self.lengths))[row, :, :length] = made[0, :, :length]
        self.positions[row, :length] = other.positions[0, :length]
        self.lengths[row] = length

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first `length` tokens of `row`."""
        self.lengths[row] = min(self.lengths[row], length)

    def copy(self) -> "KVCache":
        """The same tokens in the same storage, to go on with (`select` then copies what it keeps)."""
        other = KVCache(len(self.keys), 0, 0, self.device)
        other.keys, other.values = list(self.keys), list(self.values)
        other.positions, other.lengths = self.positions, list(self.lengths)
        return other

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order; used when answers of a batch end."""
        with torch.inference_mode(False):  # as in `store`
            index = torch.tensor(rows, device=self.device)
            for kept in (self.keys, self.values):
                kept[:] = [store if store is None else store.index_select(0, index.to(store.device)) for store in kept]
            self.positions = self.positions.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows]
