"""Pretrains a Ladder Residual transformer; start it with `deepspeed`, `torchrun`, or `python` for one process."""

from megatron_ladder.cli.programs import start

if __name__ == "__main__":
    start("pretrain")
