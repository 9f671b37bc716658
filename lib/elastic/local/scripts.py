"""The changes that Redis checks and makes in one step, as Lua. Pure.

The master loads them into a server (`MasterStore.load_scripts`); a worker may not load
any, and calls them by their hashes.
"""

NOW = """
local t = redis.call('TIME')
local now = t[1] .. '.' .. string.format('%06d', t[2])
"""

# Take or renew a slot's lease for an attempt, and note progress. 0: a higher attempt has
# claimed it. `joined` is new where this attempt's lease was not there.
LEASE = f"""{NOW}
local newest = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
if newest > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
local moving = {{'attempt', 'state', 'step', 'version', 'moves'}}
local before = redis.call('HMGET', KEYS[1], unpack(moving))
if before[1] ~= ARGV[2] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'joined', now)
end
redis.call('HSET', KEYS[1], 'beat', now, unpack(ARGV, 4))
local after = redis.call('HMGET', KEYS[1], unpack(moving))
for i = 1, #moving do
  if before[i] ~= after[i] then redis.call('HSET', KEYS[1], 'moved', now) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""

# Give a lease up, if it is still this attempt's.
RELEASE = """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('PUBLISH', ARGV[3], 'leave ' .. ARGV[1])
return 1
"""

# Offer a delta. 0: the attempt does not hold the slot.
OFFER = """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], ARGV[3])
redis.call('PUBLISH', ARGV[4], 'offer ' .. ARGV[1])
return 1
"""

# Be the master with this epoch, unless a higher one is; every later change of the
# master's hash is made by this, too. The proof is a SET: it replaces a key of any type.
MASTER = f"""{NOW}
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if epoch > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'beat', now, unpack(ARGV, 5))
redis.call('SET', KEYS[2], ARGV[4])
if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return 1
"""

ALL = (LEASE, RELEASE, OFFER, MASTER)
