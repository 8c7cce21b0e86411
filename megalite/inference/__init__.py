"""Uses of a finished model, at any layout.

loaded_model    a checkpoint of any layout on the ranks of this run; texts that follow prompts (megalite.generation)
chat            answers in conversations: by the model's own template and sampling
evaluation      loss, perplexity and bits per byte of any text
tasks           WikiText's word perplexity and LAMBADA's last-word accuracy
harness         the model in the terms of lm-evaluation-harness; its tasks during a training
"""

from megalite.inference.chat import chat_prompts, chat_template, model_sampling
from megalite.inference.evaluation import as_measured, how_scored, open_data_path, score_source, score_text
from megalite.inference.harness import TaskEvaluator, harness_model, measures_of
from megalite.inference.loaded_model import LoadedModel, generate, load_for_inference
from megalite.inference.tasks import (
    detokenize_wikitext,
    last_word_accuracy,
    read_passages,
    score_continuations,
)
