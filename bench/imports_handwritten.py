"""Models written by hand as people write them, for `bench/imports.py`: each by name, as (module, inputs[, loss])."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, SEQUENCE, CLASSES = 3, 5, 4


def classes() -> Tensor:
    return torch.randint(0, CLASSES, (BATCH,))


def images(channels: int = 3, size: int = 16) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def block(ins: int, outs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs), nn.ReLU(inplace=True))


class Recurrent(nn.Module):
    """An embedding, a recurrent network, and a classifier of its last output."""

    def __init__(self, kind: type[nn.RNNBase], **more: Any):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = kind(6, 5, batch_first=True, **more)
        self.head = nn.Linear(5 * (1 + self.inner.bidirectional), CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.inner(self.table(tokens))
        return self.head(outputs[:, -1])


def recurrent(kind: type[nn.RNNBase], **more: Any) -> tuple[Any, ...]:
    return Recurrent(kind, **more), (torch.randint(0, 11, (BATCH, SEQUENCE)), classes()), nn.CrossEntropyLoss()


class DenseNet(nn.Module):
    """Layers that read all before them; concatenation into a growing list (Huang et al., 2017)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(6 + 4 * i), nn.ReLU(inplace=True), nn.Conv2d(6 + 4 * i, 4, 3, padding=1))
            for i in range(3)
        )
        self.head = nn.Linear(18, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(F.adaptive_avg_pool2d(torch.cat(features, 1), 1).flatten(1))


class UNet(nn.Module):
    """Down, up by `up`, and skips (Ronneberger et al., 2015)."""

    def __init__(self, up: nn.Module):
        super().__init__()
        self.down, self.middle, self.up = block(3, 8), block(8, 8), up
        self.pool, self.out, self.head = nn.MaxPool2d(2), block(16, 8), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        y = self.up(self.middle(self.pool(skip)))
        return self.head(self.out(torch.cat([skip, y], 1)))


def unet(up: nn.Module) -> tuple[Any, ...]:
    return UNet(up), (images(), torch.randint(0, CLASSES, (BATCH, 16, 16))), nn.CrossEntropyLoss()


class VAE(nn.Module):
    """The reparametrisation trick (Kingma & Welling, 2014)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return torch.sigmoid(self.decoder(z)), mean, log_variance


def elbo(outputs: tuple[Tensor, Tensor, Tensor], goal: Tensor) -> Tensor:
    y, mean, log_variance = outputs
    kl = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.binary_cross_entropy(y, goal, reduction="sum") + kl


class DCGAN(nn.Module):
    """A generator of transposed convolutions and a discriminator, in one step of the generator's loss."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4, 1, 0)
        )

    def forward(self, z: Tensor) -> Tensor:
        score = self.discriminator(self.generator(z)).flatten()
        return F.binary_cross_entropy_with_logits(score, torch.ones_like(score))


class DDPM(nn.Module):
    """A step of denoising diffusion (Ho et al., 2020): random times and noise, the noise predicted."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, 1, 1))
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 10))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[t][:, None, None, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        times = (t / 10).to(x.dtype)[:, None, None, None].expand(-1, 1, *x.shape[2:])
        return F.mse_loss(self.net(torch.cat([noisy, times], 1)), noise)


class NanoGPT(nn.Module):
    """A decoder with a causal mask in a buffer, tied weights, and `(logits, loss)` as result."""

    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Embedding(SEQUENCE, 8)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("bias", torch.tril(torch.ones(SEQUENCE, SEQUENCE)).view(1, 1, SEQUENCE, SEQUENCE))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        b, t = idx.size()
        x = self.table(idx) + self.places(torch.arange(0, t, dtype=torch.long, device=idx.device))
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in self.qkv(self.norm(x)).split(8, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        x = x + self.out((att @ v).transpose(1, 2).contiguous().view(b, t, 8))
        logits = self.head(x + self.mlp(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


@dataclass
class Output:
    """A result as a dataclass."""

    logits: Tensor
    loss: Tensor


class Distilled(nn.Module):
    """A frozen teacher under `no_grad`, and a dataclass with the loss inside."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(6, CLASSES).requires_grad_(False), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        with torch.no_grad():
            goal = F.softmax(self.teacher(x) / 2, -1)
        logits = self.student(x)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), goal, reduction="batchmean")
        return Output(logits, F.cross_entropy(logits, labels) + 4 * soft)


class MaskedTransformer(nn.Module):
    """Masks and shifted inputs written in place, row by row, and a class token written into a buffer of zeros."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.cls = nn.Parameter(torch.randn(8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        b, s = tokens.shape
        shifted = tokens.new_zeros(tokens.shape)
        shifted[:, 1:] = tokens[:, :-1].clone()
        shifted[:, 0] = 1
        x = torch.zeros(b, s + 1, 8, dtype=self.cls.dtype)
        x[:, 0] = self.cls
        x[:, 1:] = self.table(shifted)
        mask = torch.zeros(s + 1, s + 1, dtype=torch.bool)
        for i in range(s + 1):
            mask[i, i + 1 :] = True
        padding = torch.zeros(b, s + 1, dtype=torch.bool)
        padding[:, 1:] = torch.arange(s)[None] >= lengths[:, None]
        x = self.layer(x, src_mask=mask, src_key_padding_mask=padding)
        x[..., 1:] *= 2
        x[padding] = 0
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens.flatten())


class DLRM(nn.Module):
    """Bags of different sizes by offsets, and pairwise products of what they give (Naumov et al., 2019)."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(9, 4, mode=mode) for mode in ("sum", "mean"))
        self.bottom, self.top = nn.Linear(5, 4), nn.Linear(4 + 3, 1)
        i, j = torch.tril_indices(3, 3, -1)
        self.register_buffer("i", i, persistent=False)
        self.register_buffer("j", j, persistent=False)

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.bottom(dense))
        parts = [x, *(table(ids[k], offsets[k]) for k, table in enumerate(self.tables))]
        z = torch.stack(parts, 1)
        pairs = torch.bmm(z, z.transpose(1, 2))[:, self.i, self.j]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, pairs], 1))[:, 0], labels)


def dlrm() -> tuple[Any, ...]:
    offsets = torch.tensor([[0, 2, 2], [0, 1, 4]])
    dense, labels = torch.randn(BATCH, 5), torch.rand(BATCH)
    return DLRM(), {"dense": dense, "ids": torch.randint(0, 9, (2, 7)), "offsets": offsets, "labels": labels}


class GNN(nn.Module):
    """Messages along edges, added up by `index_add` or reduced by `scatter_reduce`, and read out by graph."""

    def __init__(self, reduce: str):
        super().__init__()
        self.reduce, self.message, self.head = reduce, nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        source, target = edges
        m = torch.relu(self.message(x[source]))
        if self.reduce == "add":
            y = torch.zeros_like(x).index_add_(0, target, m)
            degree = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add_(0, target, torch.ones_like(m[:, 0]))
            y = y / degree.clamp(min=1)[:, None]
        else:
            y = torch.zeros_like(x).scatter_reduce(
                0, target[:, None].expand_as(m), m, reduce=self.reduce, include_self=False
            )
        out = x.new_zeros(BATCH, 6).index_add(0, graph, x + y)
        return self.head(out)


def gnn(reduce: str) -> tuple[Any, ...]:
    edges, graph = torch.randint(0, 8, (2, 14)), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    return GNN(reduce), (torch.randn(8, 6), edges, graph, classes()), nn.CrossEntropyLoss()


class GAT(nn.Module):
    """Attention over edges: a softmax by target node, of a maximum and a sum by `scatter_reduce` (Velickovic, 2018)."""

    def __init__(self):
        super().__init__()
        self.inner, self.score = nn.Linear(6, 6), nn.Linear(12, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.inner(x)
        e = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1))[:, 0], 0.2)
        top = torch.full((x.shape[0],), -1e9, dtype=x.dtype).scatter_reduce(0, target, e.detach(), "amax")
        e = (e - top[target]).exp()
        total = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add(0, target, e)
        y = torch.zeros_like(x)
        y.index_add_(0, target, (e / (total[target] + 1e-9))[:, None] * h[source])
        return y.pow(2).mean()


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """As timm has it."""
    if p == 0.0 or not training:
        return x
    keep = 1 - p
    random = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    random.div_(keep)
    return x * random


class DropPath(nn.Module):
    """Residual branches that are dropped by sample (Huang et al., 2016), with layer scale and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale, self.head = nn.Parameter(torch.full((6,), 0.5)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + drop_path(self.scale * F.gelu(layer(x)), 0.3, self.training)
        return self.head(F.dropout(x, 0.2, self.training))


class Routed(nn.Module):
    """A mixture of experts as written by hand: one mask per expert, results written into a buffer of zeros."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = self.gate(x).topk(2, -1)
        weights = torch.zeros_like(x[:, :4]).scatter_(1, chosen, values.softmax(-1))
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out += weights[:, e : e + 1] * expert(x)
        return self.head(out)


class Quantised(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class StraightThrough(nn.Module):
    """Weights rounded in the forward."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(x @ Quantised.apply(self.weight)))


class VQ(nn.Module):
    """Nearest codes by `cdist` and `argmin`, straight through (van den Oord et al., 2017)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(6, 4), nn.Linear(4, 6), nn.Embedding(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        near = torch.cdist(z, self.codes.weight).argmin(-1)
        q = self.codes(near)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return loss + F.mse_loss(self.decoder(z + (q - z).detach()), x)


class PointNet(nn.Module):
    """A maximum over points, with coordinates centred in place (Qi et al., 2017)."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x -= x.mean(1, keepdim=True)
        return self.head(self.inner(x.transpose(1, 2)).max(dim=2)[0])


class Triplet(nn.Module):
    """Normalised embeddings and a margin (Schroff et al., 2015)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 4))

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        a, p, n = (F.normalize(self.net(x), dim=-1) for x in (a, p, n))
        return F.triplet_margin_loss(a, p, n, margin=0.5) + F.cosine_similarity(a, n).mean()


class SpatialTransformer(nn.Module):
    """3-d convolution and pooling of clips, then a smooth loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 4, 3, 2, 1))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.smooth_l1_loss(self.head(self.net(x).mean((2, 3, 4)))[:, 0], y)


class Encoder(nn.Module):
    """`nn.Transformer` with a causal mask made by its own function."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.inner = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        y = self.inner(self.table(source), self.table(target), tgt_mask=mask, src_key_padding_mask=source == 0)
        return F.cross_entropy(self.head(y[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


class Ragged(nn.Module):
    """Rows chosen by a mask: how many depends on data."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)[:, 0]
        return y[x[:, 0] > 0].mean()


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 11, shape)


def rows(count: int = 1) -> tuple[Tensor, ...]:
    return tuple(torch.randn(BATCH, 6) for _ in range(count))


CE = nn.CrossEntropyLoss

MODELS: Mapping[str, Callable[[], tuple[Any, ...]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)), (*rows(), classes()), CE()),
    "vgg": lambda: (
        nn.Sequential(
            block(3, 4),
            nn.MaxPool2d(2),
            block(4, 8),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 8),
            nn.ReLU(True),
            nn.Dropout(0.5),
            nn.Linear(8, CLASSES),
        ),
        (images(), classes()),
        CE(label_smoothing=0.1),
    ),
    "densenet": lambda: (DenseNet(), (images(), classes()), CE()),
    "unet_transposed": lambda: unet(nn.ConvTranspose2d(8, 8, 2, 2)),
    "unet_bilinear": lambda: unet(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)),
    "vae": lambda: (VAE(), (x := torch.rand(BATCH, 12), x.clone()), elbo),
    "dcgan": lambda: (DCGAN(), (torch.randn(BATCH, 6, 1, 1),)),
    "ddpm": lambda: (DDPM(), (images(size=8),)),
    "lstm": lambda: recurrent(nn.LSTM, bidirectional=True),
    "gru": lambda: recurrent(nn.GRU, num_layers=2),
    "rnn_tanh": lambda: recurrent(nn.RNN),
    "transformer": lambda: (Encoder(), (tokens(BATCH, SEQUENCE), tokens(BATCH, SEQUENCE))),
    "nanogpt": lambda: (NanoGPT(), (tokens(BATCH, SEQUENCE), tokens(BATCH, SEQUENCE))),
    "distilled": lambda: (Distilled(), (*rows(), classes())),
    "masked_transformer": lambda: (MaskedTransformer(), (tokens(BATCH, SEQUENCE), torch.tensor([5, 3, 4]))),
    "dlrm_ragged": dlrm,
    "gnn_index_add": lambda: gnn("add"),
    "gnn_scatter_mean": lambda: gnn("mean"),
    "gat": lambda: (GAT(), (torch.randn(8, 6), torch.randint(0, 8, (2, 14)))),
    "drop_path": lambda: (DropPath(), (*rows(), classes()), CE()),
    "moe_by_hand": lambda: (Routed(), (*rows(), classes()), CE()),
    "straight_through": lambda: (StraightThrough(), (*rows(), classes()), CE()),
    "vq": lambda: (VQ(), rows()),
    "pointnet": lambda: (PointNet(), (torch.randn(BATCH, 7, 3), classes()), CE()),
    "triplet": lambda: (Triplet(), rows(3)),
    "conv3d": lambda: (SpatialTransformer(), (torch.randn(BATCH, 2, 4, 4, 4), torch.randn(BATCH))),
    "rows_by_mask": lambda: (Ragged(), rows()),
}
