_titanlite() {
    local IFS=$'\n' line="${COMP_LINE:0:$COMP_POINT}" command="${COMP_WORDS[1]}"
    local typed="${line##* }" previous="${line% *}" before= key= word= words=
    previous="${previous##* }"
    if [[ $typed == --*=* ]]; then
        key="${typed%%=*}" typed="${typed#*=}"
        # bash takes what comes after = as a word of its own, zsh does not.
        [[ -z $ZSH_VERSION ]] || before="$key="
    elif [[ $previous == --* && $typed != -* ]]; then
        key="$previous"
    fi
    if [[ $COMP_CWORD == 1 ]]; then
        words='@commands@'
    elif [[ -n $key ]]; then
        case "$key" in
@values@
        esac
    else
        case "$command" in
@options@
        esac
        case "$command" in @jobs@)
            [[ $typed != -* ]] || words+=$'\n''@keys@'
            for word in "$typed"*; do
                [[ ! -d $word ]] || COMPREPLY+=("$word/")
                [[ ! -f $word || $word != *.toml ]] || COMPREPLY+=("$word ")
            done
        esac
    fi
    for word in $words; do
        [[ $word != "$typed"* || ( -z $typed && $word == -* ) ]] || COMPREPLY+=("$before$word")
    done
}
complete -o default -o nospace -F _titanlite titanlite
