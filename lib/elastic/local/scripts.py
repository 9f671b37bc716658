"""The changes that Redis checks and makes in one step, as Lua. Pure.

The master loads them into a server (`MasterStore.load_scripts`); a worker has none of its
own, and calls them by their hashes.
"""

NOW = """
local t = redis.call('TIME')
local now = t[1] .. '.' .. string.format('%06d', t[2])
"""

# Whether the attempt ARGV[2] holds slot ARGV[1]. -1: fenced. 0: unknown here, claim
# again.
HELD = """
local newest = redis.call('HGET', KEYS[2], ARGV[1])
if newest and tonumber(newest) > tonumber(ARGV[2]) then return -1 end
if newest ~= ARGV[2] then return 0 end
"""

# Take a slot's lease for an attempt. 0: a higher attempt has it.
CLAIM = f"""{NOW}
local newest = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
if newest > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'beat', now, 'moved', now, 'joined', now, unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""

# Renew a lease and note progress.
BEAT = f"""{NOW}{HELD}
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local before = redis.call('HMGET', KEYS[1], 'state', 'step', 'version', 'moves')
redis.call('HSET', KEYS[1], 'beat', now, unpack(ARGV, 4))
local after = redis.call('HMGET', KEYS[1], 'state', 'step', 'version', 'moves')
if before[1] ~= after[1] or before[2] ~= after[2] or before[3] ~= after[3]
    or before[4] ~= after[4] then
  redis.call('HSET', KEYS[1], 'moved', now)
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

# Offer a delta.
OFFER = f"""{HELD}
redis.call('HSET', KEYS[1], ARGV[1] .. ':' .. ARGV[2], ARGV[3])
redis.call('PUBLISH', ARGV[4], 'offer ' .. ARGV[1])
return 1
"""

# Be the master with this epoch, if no higher one is. Also every later change of the
# master's hash. A SET replaces whatever is there, of any type.
MASTER = f"""{NOW}
local epoch = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if epoch > tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'beat', now, unpack(ARGV, 5))
redis.call('SET', KEYS[2], ARGV[4])
if ARGV[3] ~= '' then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return 1
"""

ALL = (CLAIM, BEAT, RELEASE, OFFER, MASTER)
