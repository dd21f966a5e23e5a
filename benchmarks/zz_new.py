import price as bp
from price import server

if __name__ == "__main__":
    server.PRELOAD += ["torch._subclasses.fake_tensor", "torch.distributed.fsdp"]
    for family, runs in bp.newer().items():
        for row in bp.rows_of(family, runs):
            print(f"| {' | '.join(row)} |", flush=True)
