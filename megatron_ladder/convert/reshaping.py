"""`convert_checkpoint.py reshape`: a training checkpoint in other files or rewired, optimizer state included."""

from collections.abc import Mapping

from megatron_ladder.checkpoint.publish import MANIFEST_NAME
from megatron_ladder.convert.carry_out import Conversion
from megatron_ladder.convert.options import ReshapeOptions
from megatron_ladder.convert.outputs import check_save_target, publish_save, save_work
from megatron_ladder.convert.training_checkpoint import (
    check_layout,
    checksums_of_sources,
    manifest_bytes,
    open_training_checkpoint,
    plan_checkpoint,
)
from megatron_ladder.convert.wiring import rewired, wiring_text

_DERIVED_KEYS = ("format", "schema_version", "files")
"""Of a manifest: written anew."""


def plan_reshape(options: ReshapeOptions) -> Conversion:
    """Reads manifest and headers, and says what there is to do.

    Raises:
        UserError: the checkpoint is not whole or cannot be cut so, or the target may not be written to.
    """
    source = open_training_checkpoint(options.load)
    checkpoint, iteration = source.checkpoint, source.checkpoint.iteration
    replaced = check_save_target(options.save, iteration, options.overwrite)
    tensor_parallel, stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    model, notes = rewired(source.model, options)
    check_layout(model, tensor_parallel, stages)
    plan = plan_checkpoint(source.tensors, model, tensor_parallel, stages)
    header = {key: value for key, value in checkpoint.manifest.items() if key not in _DERIVED_KEYS}
    header["model"] = model.to_dict()
    if "model" in header.get("run", {}):
        header["run"] = {**header["run"], "model": header["model"]}
    beside = source.files_beside

    def small_files(checksums: Mapping[str, str]) -> Mapping[str, bytes]:
        return {**beside, MANIFEST_NAME: manifest_bytes(plan, header, checksums, beside)}

    kinds = [kind for kind, tensors in source.tensors.items() if tensors]
    return Conversion(
        plan=plan,
        work=save_work(options.save, iteration, plan.fingerprint(header, sorted(beside.items()))),
        target=options.save,
        checksums=True,
        small_files=small_files,
        publish=lambda work: publish_save(work, options.save, iteration, replaced),
        facts=(
            f"{checkpoint.directory}: iteration {iteration}, {', '.join(kinds)}, wiring: {wiring_text(model)}",
            f"files for {tensor_parallel} tensor-parallel x {stages} pipeline ranks",
        ),
        notes=[*notes, *checkpoint.warnings],
        source_checksums=checksums_of_sources(checkpoint, plan),
    )
