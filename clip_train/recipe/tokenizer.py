"""The tokenizer of a model."""

from clip_train.data.tokenizer import Tokenize, Tokenizer
from clip_train.errors import UserError
from clip_train.models.config import AnyArchitecture, OwnModel, vocabulary_mistakes
from clip_train.models.openclip.config import OpenCLIPArchitecture


def tokenizer_of(architecture: AnyArchitecture) -> Tokenize:
    """Picklable. UserError if it is not CLIP's tokenizer and its files are missing."""
    own: Tokenize | None = None
    if isinstance(architecture, OwnModel):
        own = architecture.tokenizer
    elif isinstance(architecture, OpenCLIPArchitecture):
        from clip_train.models.openclip.model import tokenizer

        own = tokenizer(architecture)
    if own is not None:
        return own
    for mistake in vocabulary_mistakes("the model", architecture):
        raise UserError(mistake)
    return Tokenizer(architecture.text_cfg.context_length)
