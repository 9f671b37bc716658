"""A loop of one's own in local mode around a model in the style of Hugging Face: a config, a
forward() that takes labels and returns its loss, parameters of which two are one (the embedding and
the head).

`TinyForCausalLM` stands where AutoModelForCausalLM.from_pretrained(…) would, so that nothing has to
be downloaded; the loop is the same, and so is the optimizer.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic

SENTENCE = "preempted at midnight, resumed at noon, and not a sample lost. "


@dataclass
class TinyConfig:
    vocab_size: int = 128
    hidden_size: int = 48
    num_attention_heads: int = 4
    max_position_embeddings: int = 64


@dataclass
class CausalLMOutput:
    loss: torch.Tensor
    logits: torch.Tensor


class TinyForCausalLM(nn.Module):
    def __init__(self, config: TinyConfig):
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.wte = nn.Embedding(config.vocab_size, width)
        self.wpe = nn.Embedding(config.max_position_embeddings, width)
        self.block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight  # tied, as in GPT-2

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        positions = torch.arange(length, device=input_ids.device)
        hidden = self.block(self.wte(input_ids) + self.wpe(positions), mask, is_causal=True)
        logits = self.lm_head(hidden)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits)


class Tokens(Dataset):
    """Dictionaries, as a tokenizer and its collator make them."""

    def __init__(self, length: int):
        self.text, self.length = (SENTENCE * 40).encode(), length

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list(self.text[index : index + self.length]))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    config = TinyConfig()
    model = TinyForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with elastic.LocalSGD.from_env(model, optimizer) as sgd:
        for batch in sgd.batches(Tokens(config.max_position_embeddings)):
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            sgd.step(loss)


if __name__ == "__main__":
    main()
