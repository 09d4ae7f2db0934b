-- An instance shows itself, and learns how many there are and which keys others have forgotten since.
--
-- KEYS[1] the instances by when they were last seen (µs), KEYS[2] forgotten counters by when
-- ARGV[1] this instance, ARGV[2] µs after which an unseen one is gone, ARGV[3] the moment of the last answer (µs),
-- ARGV[4…] counters that this instance has forgotten, '*' for all
-- returns {instances, TIME's two parts, forgotten counters, 1 if this instance was not among those seen}

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local KEEP = 60000000 -- µs that forgotten counters stay readable
-- The clock may have been ahead when others showed themselves. Those who live do so again; the rest is as old as this moment.
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now + 1, '+inf')) do
	redis.call('ZADD', KEYS[1], now, name)
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
local new = redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], 3600000)
for i = 4, #ARGV do redis.call('ZADD', KEYS[2], now, ARGV[i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - KEEP)
if #ARGV > 3 then redis.call('PEXPIRE', KEYS[2], 3600000) end
return {redis.call('ZCARD', KEYS[1]), time[1], time[2], redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[3], '+inf'), new}
