"""The names that the errors of clips and metrics had before `jali.error`."""

from jali.error import InputError as QualityError
from jali.error import JobError as QualityJobError

__all__ = ["QualityError", "QualityJobError"]
