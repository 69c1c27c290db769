import os, random, gc
def mem():
    d={}
    for l in open('/proc/self/smaps_rollup'):
        p=l.split()
        if p[0] in('Rss:','Pss:','Anonymous:','Private_Clean:','Shared_Clean:','Private_Dirty:'): d[p[0]]=int(p[1])/1000
    return d
os.environ["MPOOL_SPECULATION"]="0"
import mpool
base=mem()
pool=mpool.Pool(mpool.PoolConfig(threads=2)); m=pool.load('/work/main/build/bench/vision/gemma4-e2b/model.gguf')
rng=random.Random(1)
for i in range(4):
    m.generate([rng.randrange(1000,100000) for _ in range(256)], max_tokens=16, temperature=0, ignore_eos=True)
    print({k: round(v-base[k]) for k,v in mem().items()}, [ (r.model_bytes/1e6, r.engine_bytes/1e6) for r in pool.ps()])
import time; time.sleep(3); print({k: round(v-base[k]) for k,v in mem().items()})
