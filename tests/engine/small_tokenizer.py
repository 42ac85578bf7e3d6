"""A tokenizer of the fake runner's 97 ids: letters, whole and half characters, a special token and an added one."""

from tokenizers import AddedToken, Tokenizer, decoders, models

SPECIAL, ADDED, UNUSED = 94, 95, 96  # the last id has no token


def _character(byte: int) -> str:
    """The character that byte-level BPE uses for a byte which is not printable ASCII."""
    if 0xA1 <= byte <= 0xAC or byte >= 0xAE:
        return chr(byte)
    others = [b for b in range(256) if not (33 <= b <= 126 or 0xA1 <= b <= 0xAC or b >= 0xAE)]
    return chr(256 + others.index(byte))


class SmallTokenizer:
    """The part of a transformers tokenizer that the engine uses. Text prompts are a token a character."""

    chat_template = None

    def __init__(self) -> None:
        halves = [_character(byte) for byte in "è漢👩".encode()]
        whole = ["".join(map(_character, "ü".encode())), "".join(map(_character, "字".encode()))]
        pairs = ["ab", "bc", "ca", "xyz", "END", "ENDE"]
        letters = [chr(code) for code in range(33, 127) if chr(code) not in "<>"]
        tokens = [*halves, *whole, *pairs, *letters][:SPECIAL]
        backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<|end|>", special=True)])
        backend.add_tokens(["<tool>"])
        assert backend.token_to_id("<tool>") == ADDED
        self.backend_tokenizer = backend
        self.added_tokens_decoder = backend.get_added_tokens_decoder()
        self.ids = {token: i for i, token in enumerate(tokens)}

    def __len__(self) -> int:
        return UNUSED

    def encode(self, text: str, *, verbose: bool = True, add_special_tokens: bool = True) -> list[int]:
        return [self.ids[letter] for letter in text]

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def decode(
        self, ids: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token_id)
