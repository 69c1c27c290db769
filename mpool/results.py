"""Types of the results of functions and methods, for annotations."""

from .completions import (
    Choice,
    Chunk,
    Completion,
    FinishReason,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from .runtime.events import PoolEvent
from .runtime.health import CapabilityPool, Health, Memory, ModelHealth, Pong, Workers
from .runtime.history import RequestRecord
from .tasks.classification import Classification, Classifications, LabelScore
from .tasks.embedding_results import SparseVectors, TextEmbeddings, TokenVectors
from .tasks.images_result import GeneratedImage, GeneratedImages, ImageStep
from .tasks.iterating import EmbedIterator
from .tasks.jobs import Job
from .tasks.rerank import RankedDocument, Ranking
from .tasks.streams import Stream
from .tasks.text_to_image import ImageStream
from .tasks.token_labels import LabelledSpan, TokenClassification, TokenClassifications

__all__ = ["CapabilityPool", "Choice", "Chunk", "Classification", "Classifications", "Completion", "EmbedIterator",
           "FinishReason", "GeneratedImage", "GeneratedImages", "Health", "ImageStep", "ImageStream", "Job",
           "LabelScore", "LabelledSpan", "Memory", "ModelHealth", "Pong", "PoolEvent", "RankedDocument", "Ranking",
           "RequestRecord", "SparseVectors", "Stream", "TextEmbeddings", "Timings", "TokenClassification",
           "TokenClassifications", "TokenLogprob", "TokenVectors", "ToolCall", "ToolCallDelta", "TopLogprob", "Usage",
           "Workers"]
