"""Models and training steps between two wirings (--anneal-staleness), compared with a plain model."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ladder.blueprint.model import ModelConfig
from megatron_ladder.engine.optimizer import build_schedule
from megatron_ladder.model.stack import StackOptions
from megatron_ladder.train.step import evaluate, train_step
from tests.helpers.operations import compile_without_compiler
from tests.helpers.pairwise import pairwise
from tests.helpers.pool import GlooPools
from tests.helpers.recording import recorded_model
from tests.helpers.sharded import Pieces, assert_pieces, build, gradient_pieces, small_model
from tests.helpers.steps import RECIPE, check_outcome, check_resume, steps_of_batches, train
from tests.helpers.training import build_trainer_here, own_batches, run_of
from tests.reference import (
    ReferenceConfig,
    Weights,
    make_weights,
    reference_gradients,
    reference_loss,
    reference_training,
)
