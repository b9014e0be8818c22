// The page: a chat beside the pipe that answers it.

import * as chat from "./chat.js";
import { watch, wake } from "./pipe.js";
import * as settings from "./settings.js";

const pipe = watch({ onModel: chat.setModel });
chat.start({ onAnswer: pipe.answered, onKey: wake });
settings.start({ system: chat.system, forgetAll: chat.forgetAll, onKey: wake });
