"""Pretrains a Ladder Residual transformer; start it with `deepspeed`, `torchrun`, or `python` for one process."""

from megatron_ladder.cli.pretrain import entry_point

if __name__ == "__main__":
    entry_point()
