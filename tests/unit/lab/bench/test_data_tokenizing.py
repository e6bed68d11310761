from megatron_ladder.data.tokenizers import ByteTokenizer
from megatron_ladder.lab.bench.data_tokenizing import _FreshEncoder


def test_the_bare_library_does_all_of_its_work() -> None:
    """Encoders work on demand, so ids that nobody requests would take no time."""
    tokenizer = ByteTokenizer()
    encoded = _FreshEncoder(tokenizer, tokenizer.kind, ["ab", "", "c"]).encode()
    assert isinstance(encoded, list) and [ids.tolist() for ids in encoded] == [[97, 98], [], [99]]
