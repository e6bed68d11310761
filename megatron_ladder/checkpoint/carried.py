"""The small files of a Hugging Face directory that stay with its model: when it is imported, trained and exported."""

GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
CARRIED = (
    *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", CHAT_TEMPLATE, GENERATION_CONFIG,
)  # fmt: skip
"""Files of a Hugging Face directory that travel with the model; none holds code."""
