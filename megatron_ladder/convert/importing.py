"""`convert_checkpoint.py import`: a Hugging Face directory becomes a training checkpoint, weights only."""

from collections.abc import Mapping
from typing import Any

from megatron_ladder.checkpoint.publish import MANIFEST_NAME
from megatron_ladder.convert.carry_out import Conversion
from megatron_ladder.convert.copying import first_difference
from megatron_ladder.convert.hf_directory import HFDirectory, open_hf_directory
from megatron_ladder.convert.logits import compare_logits
from megatron_ladder.convert.options import ImportOptions
from megatron_ladder.convert.outputs import check_save_target, publish_save, save_work
from megatron_ladder.convert.tokenizer_files import describe_tokenizer, read_carried, token_ids
from megatron_ladder.convert.training_checkpoint import check_layout, manifest_bytes, plan_checkpoint, versions
from megatron_ladder.convert.wiring import rewired, wiring_text
from megatron_ladder.errors import UserError

ITERATION = 0


def plan_import(options: ImportOptions) -> Conversion:
    """Reads all headers, and says what there is to do.

    Raises:
        UserError: the source contradicts itself or cannot be expressed, or the target may not be written to.
    """
    replaced = check_save_target(options.save, ITERATION, options.overwrite)
    directory = open_hf_directory(options.hf)
    model, notes = rewired(directory.model, options)
    check_layout(model, options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    _check_tied_head(directory)
    plan = plan_checkpoint(
        {"weight": directory.tensors}, model, options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    )
    carried = read_carried(options.hf)
    description, tokenizer, token_count = describe_tokenizer(carried)
    if token_count > model.vocab_size:
        notes.append(f"the tokenizer has {token_count} ids and the model {model.vocab_size}: the others must not occur")
    header: dict[str, Any] = {
        "iteration": ITERATION,
        "consumed_samples": 0,
        "model": model.to_dict(),
        "tokenizer": tokenizer,
        "hugging_face": {"model_type": directory.config["model_type"], **token_ids(directory.config, options.hf)},
        "versions": versions(),
    }
    beside = {**carried, **description}

    def small_files(checksums: Mapping[str, str]) -> Mapping[str, bytes]:
        return {**beside, MANIFEST_NAME: manifest_bytes(plan, header, checksums, beside)}

    fingerprint = plan.fingerprint(header, sorted(beside.items()))
    return Conversion(
        plan=plan,
        work=save_work(options.save, ITERATION, fingerprint),
        target=options.save,
        checksums=True,
        small_files=small_files,
        publish=lambda work: publish_save(work, options.save, ITERATION, replaced),
        facts=(
            f"{options.hf}: {directory.config['model_type']}, {_parameters(directory)} parameters, {directory.dtype}",
            f"wiring: {wiring_text(model)}; files for {options.tensor_model_parallel_size} tensor-parallel x "
            f"{options.pipeline_model_parallel_size} pipeline ranks",
        ),
        notes=notes,
        check_logits=lambda work: compare_logits(
            options.hf, directory.model, work, directory.config["model_type"], directory.dtype, own_code=False
        ),
    )


def _check_tied_head(directory: HFDirectory) -> None:
    head = directory.tied_head
    if head is not None and first_difference(head, directory.tensors["embedding.weight"]) is not None:
        raise UserError(
            f"{directory.path}: {head.name} is stored, and differs from model.embed_tokens.weight although "
            "tie_word_embeddings is true: which of them is the head is not known"
        )


def _parameters(directory: HFDirectory) -> str:
    count = sum(box.box.numel for tensor in directory.tensors.values() for box in tensor.boxes)
    return f"{count:,}"
