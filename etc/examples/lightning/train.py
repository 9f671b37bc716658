"""An ordinary Lightning script with one callback, which saves when the job's notice comes.

Lightning's own handler of TERM (with `save_on_exception`) does so on one GPU. On several, each rank
makes a collective call wherever the signal finds it, and they may wait for each other for ever.
"""

import argparse
import signal

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Waves(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, _index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(-1), y)
        if self.trainer.is_global_zero and self.global_step % 20 == 0:
            print(f"step {self.global_step} of {self.trainer.world_size}: {loss:.4f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class SaveOnNotice(pl.Callback):
    """All ranks save and leave after the same batch, whenever each of them got the signal."""

    def __init__(self, folder: str):
        self.folder, self.is_noticed = folder, False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, _number, _frame) -> None:
        self.is_noticed = True

    def on_train_batch_end(self, trainer, *_args) -> None:
        if trainer.strategy.reduce_boolean_decision(self.is_noticed, all=False):
            trainer.save_checkpoint(f"{self.folder}/step={trainer.global_step}.ckpt")
            trainer.should_stop = True


parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints", required=True)
parser.add_argument("--resume")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--max_steps", type=int, default=600)
options = parser.parse_args()

pl.seed_everything(0)
x = torch.rand(1024, 16) * 6 - 3
save = ModelCheckpoint(options.checkpoints, every_n_train_steps=50, save_top_k=-1)
trainer = pl.Trainer(
    accelerator="auto", devices=options.devices, num_nodes=options.nodes,
    max_steps=options.max_steps, callbacks=[save, SaveOnNotice(options.checkpoints)],
    logger=False, enable_progress_bar=False, default_root_dir=options.checkpoints,
)
batches = DataLoader(TensorDataset(x, torch.sin(x).sum(1)), batch_size=16, shuffle=True)
trainer.fit(Waves(), batches, ckpt_path=options.resume)
