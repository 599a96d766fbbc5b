"""Train a Medusa head on harvested features.

accelerate launch train/medusa.py --config configs/smollm2-medusa.yaml
"""

from headwright.train.run import main

if __name__ == "__main__":
    main(kind="medusa")
