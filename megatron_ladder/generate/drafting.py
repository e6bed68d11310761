"""Drafts of the head of multi-token prediction, which the model verifies in one step.

At each position, the head reads the model's stream and the next token, and predicts the token after that. For example,
a step with two drafts, where the previous step accepted d and chose e after it:

    position             4       5       6       7       8
    token                c       d       e
    stream of the model  h4      h5                              from the previous step, without that of a wrong draft
    head                 h4, d   h5, e                           the second output, x5, predicts f
                                         x5, f                   the head reads its own output, and predicts g
    model                                e       f       g       chooses the token after each

States that the head computed from its own outputs are overwritten in the next step, which computes them from the
model's streams. The shapes of a step do not depend on how many drafts are accepted, so it can be captured. Surplus
positions at its end read arbitrary tokens, and no other position sees them.

Layouts: token ids [b, s]; streams [s, b, h].
"""

import torch
from torch import Tensor

from megatron_ladder.generate.sampling import Drafts, Sampler
from megatron_ladder.model.language_model import LanguageModel
from megatron_ladder.model.mixers.mixer import States
from megatron_ladder.model.mtp import DraftingHead, shift_tokens
from megatron_ladder.model.sub_block import SequenceContext


class Drafter:
    """The drafting head of a model, for a batch of samples in slots.

    Attributes:
        states: those of the head's layer.
        draft_tokens: the number of drafts in a step.
    """

    def __init__(self, model: LanguageModel, head: DraftingHead, states: States, slots: int, draft_tokens: int) -> None:
        """`head` is the drafting head of `model`."""
        self._model, self._head, self.states, self.draft_tokens = model, head, states, draft_tokens
        shape = draft_tokens + 1, slots, model.config.hidden_size
        self._streams = torch.zeros(shape, dtype=model.compute_dtype, device=model.device)
        """The model's streams at the positions of its newest pass; after prompts, only the first row is used."""

    def read_prompts(self, tokens: Tensor, streams: Tensor, positions: Tensor, states: States) -> None:
        """Process some positions of prompts, given all `tokens`; the other arguments are those of the model's pass.

        The head does not process the last position of a prompt, because that needs the next token.
        """
        assert states.lengths is not None
        following = shift_tokens(tokens)[:, states.before : states.before + len(streams)]
        states = self.states._replace(before=states.before, lengths=states.lengths - 1)
        self._process(following, self._model.read_by_mtp(streams), positions, states)

    def store_streams(self, streams: Tensor) -> None:
        """Store the streams of the model's newest pass, [K + 1, b, h], or of the last tokens of prompts, [1, b, h]."""
        self._streams[: len(streams), : streams.shape[1]] = self._model.read_by_mtp(streams)

    def draft(
        self, tokens: Tensor, accepted: Tensor, positions: Tensor, uniform: Tensor, extent: int, sampler: Sampler
    ) -> Drafts:
        """Draft the tokens after the newest ones.

        Args:
            tokens: [b, K + 1], the accepted drafts of the previous step, the newest token, and arbitrary ones.
            accepted: [b, 1], the number of these drafts.
            positions: [b, 1], the positions of the newest tokens.
            uniform: [b, K], random numbers.
            extent: see `States.extent`.
        """
        states = self.states._replace(extent=extent)
        # Unused slots are at position 0.
        first = (positions - 1 - accepted).clamp(min=0)
        step_positions = first + torch.arange(self.draft_tokens + 1, device=first.device)
        outputs = self._process(tokens, self._streams[:, : len(tokens)], step_positions.t(), states)
        newest = outputs.gather(0, accepted.unsqueeze(2).transpose(0, 1).expand(-1, -1, outputs.shape[2]))
        drafts: list[Drafts] = []
        for number in range(self.draft_tokens):
            if drafts:
                newest = self._process(drafts[-1].tokens, newest, (positions + number - 1).t(), states)
            logits = self._model.head.logits(newest)[0]
            drafts.append(sampler.draft(logits, uniform[:, number : number + 1]))
        return Drafts.joined(drafts)

    def _process(self, following: Tensor, streams: Tensor, positions: Tensor, states: States) -> Tensor:
        """Return the outputs of the head at `positions` [s, b or 1], given the token after each."""
        context = self._head.stack.prepare(SequenceContext(positions, states))
        output: Tensor = self._head(self._model.embedding(following), streams, context)[0]
        return output
