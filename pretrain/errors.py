"""Errors of runs and their checkpoints that a user can cause. Torch-free."""

from foundation.errors import UserError


class CheckpointError(UserError):
    """A checkpoint is incomplete, corrupted, or belongs to another run."""


class UnreadableError(CheckpointError):
    """Storage failed while a checkpoint was read; the checkpoint may be whole."""

    is_of_site = True


class OtherVersionError(CheckpointError):
    """A checkpoint has another format: another version of this program reads it."""


class UndoneError(CheckpointError):
    """A checkpoint is undone: the run went back to an earlier step."""


class PrunedError(CheckpointError):
    """A run that trains has removed a checkpoint, as it keeps only the latest."""


class TrainingError(UserError):
    """A run does not learn and cannot recover automatically."""


class StorageError(UserError):
    """Storage failed for longer than the run retries, or a stop request ended the wait."""
