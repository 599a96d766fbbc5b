"""Train a Hydra head on harvested features.

accelerate launch train/hydra.py --config configs/smollm2-hydra.yaml
"""

from headwright.train.run import main

if __name__ == "__main__":
    main(kind="hydra")
