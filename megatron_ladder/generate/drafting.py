"""Drafts of the head of multi-token prediction, which the model verifies in one step.

At a position, the head reads the stream of the model there and the next token, and predicts the one after. A step with
two drafts; the previous step accepted d, and chose e after it:

    position             4       5       6       7       8
    token                c       d       e
    stream of the model  h4      h5                              of the last step, and one more of a wrong draft
    head                 h4, d   h5, e                           the second output predicts f
                                         x5, f                   and again, of its own output x5: predicts g
    model                                e       f       g       chooses the tokens after each

The head's states come from the model's streams: the next step overwrites what the head made of its own outputs. A step
has the same shapes whatever it accepts, so it can be captured; surplus positions at its end read any token, and nothing
sees them.

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
        states: what the head's layer keeps, whose columns later tokens overwrite.
        draft_tokens: drafts of a step.
    """

    def __init__(self, model: LanguageModel, head: DraftingHead, states: States, slots: int, draft_tokens: int) -> None:
        """`head` is that of the model."""
        self._model, self._head, self.states, self.draft_tokens = model, head, states, draft_tokens
        shape = draft_tokens + 1, slots, model.config.hidden_size
        self._streams = torch.zeros(shape, dtype=model.compute_dtype, device=model.device)
        """The model's streams at the positions of its newest pass; for samples that begin, in the first row."""

    def read_prompts(self, tokens: Tensor, streams: Tensor, positions: Tensor, states: States) -> None:
        """Process a part of prompts, of which all `tokens` are given; the arguments are those of the model's pass.

        The head does not process the last token of a prompt: it needs the next one.
        """
        assert states.lengths is not None
        following = shift_tokens(tokens)[:, states.before : states.before + len(streams)]
        states = self.states._replace(before=states.before, lengths=states.lengths - 1)
        self._process(following, self._model.read_by_mtp(streams), positions, states)

    def follow(self, streams: Tensor) -> None:
        """Keep the streams of the newest pass of the model, [K + 1, b, h], or of the last tokens of prompts."""
        self._streams[: len(streams), : streams.shape[1]] = self._model.read_by_mtp(streams)

    def draft(
        self, tokens: Tensor, accepted: Tensor, positions: Tensor, uniform: Tensor, extent: int, sampler: Sampler
    ) -> Drafts:
        """Draft the tokens after the newest ones.

        Args:
            tokens: [b, K + 1], the accepted drafts of the last step, the newest token, and any others.
            accepted: [b, 1], how many drafts these are.
            positions: [b, 1], those of the newest tokens.
            uniform: [b, K], random numbers.
            extent: see `States.extent`.
        """
        states = self.states._replace(extent=extent)
        # Unused slots are at position 0.
        first = (positions - 1 - accepted).clamp(min=0)
        places = first + torch.arange(self.draft_tokens + 1, device=first.device)
        outputs = self._process(tokens, self._streams[:, : len(tokens)], places.t(), states)
        newest = outputs.gather(0, accepted.unsqueeze(2).transpose(0, 1).expand(-1, -1, outputs.shape[2]))
        drafts: list[Drafts] = []
        for number in range(self.draft_tokens):
            if drafts:
                newest = self._process(drafts[-1].tokens, newest, (positions + number - 1).t(), states)
            logits = self._model.head.logits(newest)[0]
            drafts.append(sampler.draft(logits, uniform[:, number : number + 1]))
        return Drafts.joined(drafts)

    def _process(self, following: Tensor, streams: Tensor, positions: Tensor, states: States) -> Tensor:
        """Return the outputs of the head at `positions` [s, b or 1], given the tokens that follow there."""
        context = self._head.stack.prepare(SequenceContext(positions, states))
        output: Tensor = self._head(self._model.embedding(following), streams, context)[0]
        return output
