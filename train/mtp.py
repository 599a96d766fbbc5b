"""Train an MTP head on harvested features.

accelerate launch train/mtp.py --config configs/smollm2-mtp.yaml
"""

from headwright.train.run import main

if __name__ == "__main__":
    main(kind="mtp")
