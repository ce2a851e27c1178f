"""Numbers derived from a seed and a few words, the same on every machine and in every process."""

import hashlib

__all__ = ["derive"]


def derive(*words: int | str) -> int:
    """Mix words into one number.

    Args:
        words: What the number shall depend on, such as ``(seed, "site", "site-3", round)``. 1 and "1" are
            different words.

    Returns:
        0 to 2**64 - 1: the first 8 bytes, little-endian, of the BLAKE2b digest of the words, each written
        with its length and type before it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for word in words:
        text = str(word).encode()
        digest.update(b"%c%d:" % (b"i" if isinstance(word, int) else b"s", len(text)))
        digest.update(text)
    return int.from_bytes(digest.digest(), "little")
