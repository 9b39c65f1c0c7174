"""Cost of one operator on a PyTorch DTensor against the plain operator, in microseconds (needs torch==2.11.0)."""
import os, time, torch, torch.distributed as dist
os.environ.update(MASTER_ADDR='127.0.0.1',MASTER_PORT='0',RANK='0',WORLD_SIZE='1')
torch.set_num_threads(1)
dist.init_process_group('gloo')
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, Replicate, distribute_tensor
m=init_device_mesh('cpu',(1,))
def us(f,n=3000):
    for _ in range(n//10): f()
    t=time.perf_counter()
    for _ in range(n): f()
    return (time.perf_counter()-t)/n*1e6
a=torch.randn(8,8); b=torch.randn(8,8)
da=distribute_tensor(a,m,[Shard(0)]); db=distribute_tensor(b,m,[Shard(0)]); dr=distribute_tensor(b,m,[Replicate()])
with torch.no_grad():
    print('add plain',us(lambda:a+b),'dt',us(lambda:da+db))
    print('mm plain',us(lambda:a@b),'dt',us(lambda:da@dr))
    print('t plain',us(lambda:a.t()),'dt',us(lambda:da.t()))
def mk(d):
    x=torch.randn(4,16); w=torch.randn(32,16); bb=torch.randn(32)
    if d: x,w,bb=[distribute_tensor(t,m,[Replicate()]) for t in (x,w,bb)]
    w.requires_grad_(True); bb.requires_grad_(True)
    def step():
        y=torch.nn.functional.gelu(torch.nn.functional.linear(x,w,bb)); l=y.pow(2).mean(); l.backward()
    return step
print('step plain',us(mk(0),1000),'dt',us(mk(1),1000))
