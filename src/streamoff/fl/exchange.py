"""What model parameters are while they travel between the server and the training code."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from streamoff.errors import UsageError

__all__ = ["ExchangeFormat"]


class ExchangeFormat(StrEnum):
    """Whether parameters travel as NumPy arrays or as torch tensors.

    Only torch tensors can land on disk: arrays always land in memory.
    """

    NUMPY = "numpy"
    PYTORCH = "pytorch"

    @classmethod
    def of(cls, value: object, option: str = "server_expected_format") -> Self:
        """Read a setting; case and surrounding space of a string do not matter.

        Args:
            value: A member, or its name in any case.
            option: The setting it was given for, for the message.

        Raises:
            UsageError: Anything else.
        """
        if isinstance(value, str):
            text = value.strip().lower()
            for member in cls:
                if member.value == text:
                    return member
        raise UsageError(f"option {option!r}", expected="'numpy' or 'pytorch'", got=value)

    @property
    def can_offload(self) -> bool:
        """Whether tensors of this format can land on disk."""
        return self is ExchangeFormat.PYTORCH

    def offload_warning(self, option: str = "server_expected_format") -> str | None:
        """Say why asking for disk offload has no effect with this format, or None if it has one."""
        if self.can_offload:
            return None
        return (
            f"enable_tensor_disk_offload has no effect with {option}={self.value!r}: NumPy arrays "
            f"always land in memory. Set {option}='pytorch' to land tensors on disk"
        )
