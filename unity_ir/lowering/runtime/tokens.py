# pyright: basic, reportPrivateImportUsage=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalCall=false
"""Read this rank's pieces of token files, which are mapped into memory, a step ahead of training."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from unity_ir.lowering.runtime.pieces import pins, positions
from unity_ir.lowering.runtime.plan import INPUTS
from unity_ir.lowering.runtime.ranks import fail

# --- copied into the program from here on ---


# --- token files


TOKENS, LABELS = ("tokens", "input_ids", "ids"), ("labels", "targets")
"""Names of the inputs that a token file fills; of inputs with other names the first has the tokens."""


class Tokens:
    """
    Samples of a file of token ids, .npy or .bin (raw uint16, or uint32 if the model has more ids), as two inputs of a
    model, in `names`: tokens and labels, both [samples, length] of integers. The tokens of sample i are the file's ids
    from i * length on, its labels those one further. Given the id that is the last of each document, `document_end`,
    samples begin with documents: the first that the sample before does not have to its end. Of a document that is
    longer, samples have parts. Samples are shuffled every epoch by `seed` or, without `is_shuffled`, in order.
    """

    def __init__(self, path, names, seed, is_shuffled, document_end=None):
        self.path, self.seed, self.is_shuffled = path, seed, is_shuffled
        self.names = self._tokens_and_labels(path, names)
        self.samples, self.length = INPUTS[self.names[0]].shape
        self.ids = self._mapped(path, max(INPUTS[name].below or 0 for name in self.names))
        self.there = max(len(self.ids) - 1, 0) // self.length
        self.starts = None  # where samples begin, if not at multiples of their length
        self.packed = ""  # what there is to say of that
        if document_end is not None and self.there:
            self._pack(document_end)
        if self.there < self.samples:
            wanted = f"a batch takes {self.samples * self.length + 1}"
            fail(f"{path}: it has {len(self.ids)} ids; {wanted}: {self.samples} samples of {self.length}, and one more")
        self.thread = ThreadPoolExecutor(1)
        self.ahead = None  # the step that is read ahead, and its pieces to come
        self.order = None  # an epoch, and its order

    def _pack(self, end):
        """
        Find where samples begin that begin with documents, each of which ends with the id `end`; end the run if there
        are fewer than a batch takes, or no such id.
        """
        import numpy

        count, length, some = len(self.ids), self.length, 1 << 24
        ends = [numpy.flatnonzero(self.ids[at : at + some] == end) + at for at in range(0, count, some)]
        begins = numpy.concatenate([[0], *(each + 1 for each in ends)])
        begins = begins[begins < count]
        if len(begins) == 1:
            fail(f"{self.path}: no document ends, as none of its {count} ids is {end}; leave --document-end out")
        starts, at = [], 0
        while at + length < count:
            starts.append(at)
            last = int(begins[numpy.searchsorted(begins, at + length, "right") - 1])
            at = last if last > at else at + length
        if len(starts) < self.samples:
            wanted = f"a batch takes {self.samples}"
            fail(f"{self.path}: it has {len(starts)} samples of {length} that begin with documents; {wanted}")
        sizes = numpy.diff(numpy.concatenate([begins, [count]]))
        longer, again = int((sizes > length).sum()), len(starts) * length - (starts[-1] + length)
        self.starts, self.there = torch.tensor(starts), len(starts)
        self.packed = (
            f"{self.path}: {len(sizes)} documents in {len(starts)} samples of {length}; {longer} are longer, and cut "
            f"into parts of that; {100 * again / (len(starts) * length):.1f}% of ids are there twice"
        )

    @staticmethod
    def _tokens_and_labels(path, names):
        """Return the names of the inputs that have tokens and labels, by their names or else their order."""
        specs = [INPUTS[name] for name in names]
        integers = all(spec.dtype in (torch.int32, torch.int64) and len(spec.shape) == 2 for spec in specs)
        if len(names) != 2 or not integers or specs[0].shape != specs[1].shape:
            fail(f"{path}: a token file is for two inputs of ids, both [samples, length]; here are {', '.join(names)}")
        first, second = names
        return (second, first) if first in LABELS or (second in TOKENS and first not in TOKENS) else (first, second)

    @staticmethod
    def _mapped(path, below):
        """
        Return the file's ids, which are less than `below`, as a numpy array mapped into memory; end the run if they are
        no integers in one dim.
        """
        import numpy

        try:
            if str(path).endswith(".bin"):
                return numpy.memmap(path, numpy.uint16 if below <= 2**16 else numpy.uint32, "r")
            ids = numpy.load(path, "r", allow_pickle=False)
            shape, dtype = list(ids.shape), ids.dtype  # an .npz file has neither
        except Exception as e:  # numpy raises many classes for damaged files
            fail(f"cannot read {path}: {e}")
        if len(shape) != 1 or dtype.kind not in "iu":
            fail(f"{path}: it is {shape}, {dtype}; token ids are integers in one dim")
        return ids

    def batch(self, t):
        """Return {input name: whole tensor [samples, length]} of the tokens and labels of step `t` (from 0)."""
        try:
            return {name: self._read(name, self._taken(t), torch.arange(self.length)) for name in self.names}
        except ValueError as e:
            fail(e)

    def pieces(self, ctx, t):
        """Return {input: this rank's piece} of the batch of step `t`, from 0, on its device; begin to read the next."""
        if self.ahead is None or self.ahead[0] != t:
            self.ahead = t, self.thread.submit(self._pieces, ctx, t)
        try:
            found = self.ahead[1].result()
        except ValueError as e:
            fail(e)
        self.ahead = t + 1, self.thread.submit(self._pieces, ctx, t + 1)
        return {n: ids if ids is None else ids.to(ctx.device, non_blocking=True) for n, ids in found.items()}

    def _pieces(self, ctx, t):
        """Read the rows and columns that this rank has of `batch(t)`, and no others, into pinned memory for GPUs."""
        taken, found = self._taken(t), {}
        for name in self.names:
            spec = INPUTS[name]
            found[name] = None
            if ctx.at(pins(spec)):
                found[name] = self._read(name, taken[positions(ctx, spec, 0)], positions(ctx, spec, 1))
                if ctx.device.type == "cuda":
                    torch.cuda.set_device(ctx.device)  # of this thread
                    found[name] = found[name].pin_memory()
        return found

    def _taken(self, t):
        """Return the numbers of the samples in step `t`'s (from 0) batch."""
        epoch, within = divmod(t, self.there // self.samples)
        order = self.order
        if order is None or order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shuffled = torch.randperm(self.there, generator=generator) if self.is_shuffled else torch.arange(self.there)
            self.order = order = epoch, shuffled
        return order[1][within * self.samples : (within + 1) * self.samples]

    def _read(self, name, taken, columns):
        """Return the columns of samples `taken` of an input; raise ValueError for ids that it cannot have."""
        spec, shift = INPUTS[name], self.names.index(name)
        starts = taken * self.length if self.starts is None else self.starts[taken]
        at = (starts[:, None] + columns + shift).numpy()
        ids = self.ids[at]
        below = torch.iinfo(spec.dtype).max if spec.below is None else spec.below
        wrong = (ids < 0) | (ids >= below)
        if wrong.any():
            raise ValueError(
                f"{self.path}: id {ids[wrong][0]} at {at[wrong][0]} is outside 0 to {below - 1}, of {name}"
            )
        return torch.from_numpy(ids.astype("int64")).to(spec.dtype)
