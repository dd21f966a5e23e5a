"""Transformers by their shape: how many parameters, how many operations."""

from typing import NamedTuple


class Model(NamedTuple):
    """A decoder of equal layers; widths are in numbers, `sequence` in tokens.

    `kv_heads` heads of keys and values (0: as many as `heads`), `ffn` inside the perceptron
    (0: four times `hidden`). A `gated` perceptron has three matrices instead of two, as in
    Llama, and such models have no dropout. With `tied` the head shares the embedding. Each
    layer has `experts` such perceptrons, of which a token uses `active`; the router's few
    parameters don't count.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51_200
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = True
    experts: int = 1
    active: int = 1

    @property
    def kv_width(self) -> float:
        """The numbers of a token's keys, and of its values."""
        return self.hidden * (self.kv_heads or self.heads) / self.heads

    @property
    def ffn_width(self) -> int:
        """The width inside the perceptron."""
        return self.ffn or 4 * self.hidden

    @property
    def layer_parameters(self) -> float:
        """Of one layer: attention and perceptrons, without norms and biases."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        return attention + self.experts * self.mlp_parameters

    @property
    def mlp_parameters(self) -> float:
        """Of one perceptron, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_width

    @property
    def expert_parameters(self) -> float:
        """Of all experts of all layers; none where each layer has one perceptron."""
        return self.layers * self.experts * self.mlp_parameters * (self.experts > 1)

    @property
    def embedding_parameters(self) -> float:
        """Of the embedding, and of the head if that is another matrix."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def parameters(self) -> float:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def layer_flops(self) -> float:
        """Operations of one token in one layer's matrices, forward: two a parameter used."""
        idle = self.experts - self.active
        return 2 * (self.layer_parameters - idle * self.mlp_parameters)

    def attention_flops(self, causal: bool = False) -> float:
        """Operations of one token between queries, keys and values of one layer, forward.

        A kernel that knows that no token looks ahead (`causal`) does half of them.
        """
        return 4 * self.sequence * self.hidden * (0.5 if causal else 1)

    def head_flops(self) -> float:
        """Operations of one token in the head, forward."""
        return 2 * self.vocabulary * self.hidden

    def flops_per_token(self, recompute: bool = False, causal: bool = False) -> float:
        """Operations of one token in forward and backward, which is twice the forward.

        With `recompute` the layers' second forward counts too, as in equation (3) of
        https://arxiv.org/abs/2104.04473; without it only what the model needs.
        """
        layer = self.layer_flops() + self.attention_flops(causal)
        return (4 if recompute else 3) * self.layers * layer + 3 * self.head_flops()


def model_of(parameters: float, sequence: int = 2048, vocabulary: int = 51_200) -> Model:
    """A model of about so many parameters, in the proportions of published ones.

    Heads are 128 wide, and there is about a layer for 128 of width, as in GPT-3, or fewer in
    the smallest. Raises ValueError below 50 million parameters.
    """
    if not parameters >= 5e7:
        raise ValueError(f"parameters must be 50 million or more, got {parameters:g}")
    hidden = max(512, 128 * round((parameters * 128 / 12) ** (1 / 3) / 128))
    if hidden > 4096:
        hidden = 1024 * round(hidden / 1024)  # so that heads can be shared out by eight
    layers = max(2, round((parameters - vocabulary * hidden) / (12 * hidden**2)))
    if layers > 16:
        layers = 8 * round(layers / 8)  # so that stages can be equal
    return Model(layers, hidden, hidden // 128, sequence, vocabulary)
